"""Keeps groups over several calls: tokens stay in their groups from one denoising step to the next while they fit.

Clustering takes up to a third of a call at small budgets and finds nearly the same groups again
(docs/decisions/0013-groups-are-kept.md). A sample of rows shows which heads have changed too much: only these
are clustered again. Where the host must not wait for such an answer, the number of calls decides.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...types import Grouping, GroupMemory, Partition, Rows
from ...util.golden import golden_indices
from ..stages import SizedCall
from .partition import Space, group_tokens, keep_empty

SAMPLE = 256  # rows per head that show whether groups still fit
# A head is clustered again if the squared distance of its rows to their own centroid exceeds that to the
# nearest centroid by this factor. Fresh groups have 1.00 to 1.01; at 1.1 the error has grown by 1 to 6 %.
STALE = 1.1
# K-means steps from the centroids of another branch or transformer. With 2 the error is 5 to 17 % larger than
# after a cold start, with 5 it is the same (docs/decisions/0017-groups-are-lent.md).
BORROWED_STEPS = 5


def keep(sized: SizedCall, grouping: Grouping) -> GroupMemory:
    """What the next call can start from."""
    call, sizes, may_wait = sized.call, sized.sizes, sized.rules.host_may_wait
    keys = grouping.kv_centroids[..., : sizes.kv_groups, :]
    memory = GroupMemory(grouping.query_centroids.to(call.q.dtype), keys.to(call.q.dtype), age=grouping.age)
    if grouping.age + 1 >= sized.config.regroup_every or not (may_wait or call.key_mask is None):
        return memory
    return replace(
        memory,
        query_labels=_compact(grouping.query),
        kv_labels=_compact(grouping.kv),
        key_factor=grouping.key_factor if may_wait else None,
        query_factor=grouping.query_factor if may_wait else None,
    )


def group_again(sized: SizedCall, memory: GroupMemory | None, keep_coordinates: bool) -> Grouping:
    """Groups of a call: those of the call before in heads where they still fit, new ones elsewhere, started
    from the old ones.

    `memory` is what `keep` stored after the call before, if any. Where the coordinates of all queries are wanted, all
    are clustered.
    """
    config, sizes = sized.config, sized.sizes
    if memory is None:
        return group_tokens(sized, keep_coordinates=keep_coordinates)
    counts = (memory.query_centroids.shape[2], memory.kv_centroids.shape[2])
    if counts != (sizes.query_groups, sizes.kv_groups):
        memory = _resized(sized, memory)
    if memory.borrowed:
        steps = min(config.kmeans_cold, max(config.kmeans_warm, BORROWED_STEPS))
        return group_tokens(sized, memory.centroids, keep_coordinates=keep_coordinates, steps=steps)
    if keep_coordinates or not _same_keys(sized, memory):
        return group_tokens(sized, memory.centroids, keep_coordinates=keep_coordinates)
    grouping = _as_before(sized, memory)
    if not sized.rules.host_may_wait:
        return grouping
    stale = stale_heads(sized, grouping)
    if not stale.any():
        return grouping
    if stale.all():
        return group_tokens(sized, memory.centroids, keep_coordinates=keep_coordinates)
    return _renewed(sized, memory, grouping, stale)


def _resized(sized: SizedCall, memory: GroupMemory) -> GroupMemory:
    """Centroids for other group counts, to start from: sizes follow the budget, which may differ from step to step."""
    call, sizes = sized.call, sized.sizes
    queries = _as_many(memory.query_centroids, sizes.query_groups, call.q, call.free_queries)
    keys = _as_many(memory.kv_centroids, sizes.kv_groups, call.k, call.free_keys)
    return GroupMemory(queries, keys, borrowed=True)


def _as_many(centroids: Tensor, count: int, x: Tensor, rows: Rows) -> Tensor:
    """Some of the centroids [B, H, C, D], or all of them and rows of x [B, H, N, D].  # [B, H, count, D]"""
    have = centroids.shape[2]
    more = count - have
    if more <= 0:
        return centroids[:, :, torch.arange(count, device=x.device) * have // count]
    index = rows.index(x.device)[golden_indices(more, rows.count, x.device)]
    return torch.cat([centroids, x[:, :, index].to(centroids.dtype)], 2)


def _same_keys(sized: SizedCall, memory: GroupMemory) -> bool:
    """Whether the stored groups hold the keys of this call, and may be used at all."""
    if memory.kv_labels is None:
        return False
    call = sized.call
    if not sized.rules.host_may_wait:  # then labels are only kept for calls without padding
        return call.key_mask is None
    grouped = memory.kv_labels[:, 0] >= 0  # [B, Nk], keys that were not padding
    return bool(grouped.all()) if call.key_mask is None else torch.equal(call.key_mask, grouped)


def _as_before(sized: SizedCall, memory: GroupMemory) -> Grouping:
    call, sizes, backend = sized.call, sized.sizes, sized.backend
    assert memory.query_labels is not None and memory.kv_labels is not None
    pinned = int(call.pinned_keys.count > 0)
    query = backend.sort_groups(memory.query_labels.long(), sizes.query_groups)
    kv = backend.sort_groups(memory.kv_labels.long(), sizes.kv_groups + pinned)
    reused = torch.ones(call.k.shape[:2], dtype=torch.bool, device=call.k.device)
    return Grouping(
        query,
        kv,
        keep_empty(backend.group_means(call.q, query), query, memory.query_centroids),
        keep_empty(backend.group_means(call.k, kv, keep=True), kv, memory.kv_centroids),
        call.q.new_empty(0),
        pinned,
        memory.key_factor,
        memory.query_factor,
        memory.age + 1,
        reused,
    )


def stale_heads(sized: SizedCall, grouping: Grouping) -> Tensor:
    """Heads whose keys, or whose queries on average over the heads that share them, no longer fit their groups.

    -> [B, Hkv] bool
    """
    call, sizes, backend = sized.call, sized.sizes, sized.backend
    centroids = grouping.kv_centroids[..., : sizes.kv_groups, :]
    of_keys = Space(grouping.key_factor, normalise=False, backend=backend)
    of_queries = Space(grouping.query_factor, normalise=True, backend=backend)
    keys = _excess(call.k, call.free_keys, grouping.kv, centroids, of_keys)
    queries = _excess(call.q, call.free_queries, grouping.query, grouping.query_centroids, of_queries)
    queries = queries.unflatten(1, (call.k.shape[1], call.heads_per_kv))
    return ~((keys <= STALE) & (queries.mean(2) <= STALE))  # NaN counts as stale


def _excess(x: Tensor, rows: Rows, partition: Partition, centroids: Tensor, space: Space) -> Tensor:
    """Squared distance of sampled rows to their own centroid over that to the nearest one.  # [B, H]"""
    index = rows.index(x.device)[golden_indices(min(SAMPLE, rows.count), rows.count, x.device)]
    index = index.expand(*x.shape[:2], -1)
    points = space.coordinates(space.backend.gather_rows(x, index))  # [B, H, S, R]
    centres = space.coordinates(centroids.to(x.dtype))  # [B, H, C, R]
    # without the square of the point, which is the same in all distances of a row
    apart = centres.square().sum(-1)[..., None, :] - 2 * space.backend.matmul(points, centres.mT)  # [B, H, S, C]
    empty = partition.sizes[..., None, : centres.shape[2]] == 0
    nearest = torch.where(empty, torch.inf, apart).amin(-1)  # [B, H, S]
    group = partition.labels.gather(-1, index)
    own = apart.gather(-1, group.clamp(min=0)[..., None])[..., 0]
    square = points.square().sum(-1)
    grouped = group >= 0  # not padding
    own, nearest = (torch.where(grouped, (d + square).clamp(min=0), 0.0).sum(-1) for d in (own, nearest))
    return torch.where(own == 0, 1.0, own / nearest)


def _renewed(sized: SizedCall, memory: GroupMemory, grouping: Grouping, stale: Tensor) -> Grouping:
    """The grouping with the heads `stale` [B, Hkv] clustered again, each as a batch entry of its own."""
    call, backend = sized.call, sized.backend
    heads = stale.flatten().nonzero()[:, 0]

    def some(x: Tensor) -> Tensor:
        """The chosen heads of [B, Hkv, ...] as [n, 1, ...]; of [B, H, ...] the query heads that share them."""
        shares = x.shape[1] // call.k.shape[1]
        return x.unflatten(1, (call.k.shape[1], shares)).flatten(0, 1)[heads]

    def merged(old: Tensor, new: Tensor) -> Tensor:
        shares = old.shape[1] // call.k.shape[1]
        by_head = old.unflatten(1, (call.k.shape[1], shares)).flatten(0, 1).clone()
        by_head[heads] = new
        return by_head.view_as(old)

    mask = None if call.key_mask is None else call.key_mask[heads // call.k.shape[1]]
    keys = some(call.k)
    part = replace(call, q=some(call.q), k=keys, v=keys, key_mask=mask)  # grouping does not use the values
    start = (some(memory.query_centroids), some(memory.kv_centroids))
    fresh = group_tokens(replace(sized, call=part), start, keep_coordinates=False)
    factors: dict[str, Any] = {
        name: merged(old, new)
        for name in ("key_factor", "query_factor")
        if (old := getattr(grouping, name)) is not None and (new := getattr(fresh, name)) is not None
    }
    return replace(
        grouping,
        query=backend.sort_groups(merged(grouping.query.labels, fresh.query.labels), grouping.query.groups),
        kv=backend.sort_groups(merged(grouping.kv.labels, fresh.kv.labels), grouping.kv.groups),
        query_centroids=merged(grouping.query_centroids, fresh.query_centroids),
        kv_centroids=merged(grouping.kv_centroids, fresh.kv_centroids),
        reused=~stale,
        **factors,
    )


def _compact(partition: Partition) -> Tensor:
    """Labels in the smallest integer type that holds them: states of all layers are kept at the same time."""
    return partition.labels.to(torch.int16 if partition.groups < 1 << 15 else torch.int32)

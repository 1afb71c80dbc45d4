"""The partitioners, and the stage that sorts the tokens of a call into groups.

A partitioner only defines the coordinates in which keys and queries are compared; clustering, pinned tokens,
padding and warm starts are the same for all. A new one is a class with `@PARTITIONERS.register`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...config import PARTITIONS
from ...ops.backend import Backend
from ...registry import Registry
from ...types import Call, Grouping, Partition, Rows
from ..stages import SizedCall
from .kmeans import first_rows, kmeans_labels
from .response import Space, key_metric, metric_factor, query_metric


class Partitioner:
    """Coordinates as linear maps of the activations; None: the activations themselves are compared."""

    name: ClassVar[str]

    def key_factor(self, sized: SizedCall) -> Tensor | None:
        """The map for keys.  # [B, Hkv, D, R] fp32"""
        return None

    def query_factor(self, sized: SizedCall, centroids: Tensor, counts: Tensor) -> Tensor | None:
        """The map for queries, given the K/V groups' centroids [B, Hkv, Ck, D] and counts [B, Hkv, Ck]; the
        mapped queries are RMS-normalised.  # [B, Hkv, D, R] fp32"""
        return None


class Partitioners(Registry[Partitioner]):
    """The registered partitioners; a `Config` knows their names."""

    def add(self, one: Partitioner) -> None:
        super().add(one)
        PARTITIONS.add(one.name)

    def remove(self, name: str) -> None:
        super().remove(name)
        PARTITIONS.remove(name)


PARTITIONERS = Partitioners("partition")


@PARTITIONERS.register
class Semantic(Partitioner):
    """K-means on the activations of queries and of keys, separately: the reference partition."""

    name = "semantic"


@PARTITIONERS.register
class KeyResponse(Partitioner):
    """Keys by their responses under sampled queries; queries by their activations."""

    name = "key-response"

    def key_factor(self, sized: SizedCall) -> Tensor | None:
        call, sizes, backend = sized.call, sized.sizes, sized.backend
        rows = call.free_queries.take(call.q, 2)
        of_keys = key_metric(rows, sizes.metric_rows, sized.config.metric_spacing, backend)  # [B, H, D, D]
        if call.heads_per_kv > 1:
            # heads that share keys share a key metric: the mean of theirs
            of_keys = of_keys.unflatten(1, (call.k.shape[1], call.heads_per_kv)).mean(2)
        return metric_factor(of_keys, sizes.key_rank, sized.rules, backend)


@PARTITIONERS.register
class ResponseCoupled(KeyResponse):
    """The paper's partition: key groups from query responses, then query groups from key groups."""

    name = "response"

    def query_factor(self, sized: SizedCall, centroids: Tensor, counts: Tensor) -> Tensor | None:
        metric = query_metric(centroids, counts, sized.backend)
        return metric_factor(metric, sized.sizes.query_rank, sized.rules, sized.backend)


def group_tokens(
    sized: SizedCall,
    start: tuple[Tensor, Tensor] | None = None,
    *,
    keep_coordinates: bool = True,
    steps: int | None = None,
) -> Grouping:
    """Groups keys, then queries. `start` holds the centroids (queries, keys) of the step before, in the
    original space: the coordinates rotate from step to step, so the centroids are projected again. `steps` of
    k-means; None: as the config says for a cold or a warm start."""
    call, config, sizes, backend = sized.call, sized.config, sized.sizes, sized.backend
    partitioner = PARTITIONERS[config.partition]
    if steps is None:
        steps = config.kmeans_cold if start is None else config.kmeans_warm
    query_start, key_start = (None, None) if start is None else start

    keys = call.free_keys.take(call.k, 2)
    valid = None if call.key_mask is None else call.free_keys.take(call.key_mask, 1)
    key_factor = partitioner.key_factor(sized)
    space = Space(key_factor, normalise=False, backend=backend, rough=True)
    _, labels = _cluster(keys, space, sizes.kv_groups, steps, key_start, valid)
    kv, pinned_groups = _kv_partition(call, labels, sizes.kv_groups, backend)
    means = backend.group_means(call.k, kv, keep=True)  # [B, Hkv, Ck, D]
    kv_centroids = keep_empty(means, kv, _first_rows(keys, sizes.kv_groups, valid) if key_start is None else key_start)

    free = sizes.kv_groups
    factor = partitioner.query_factor(sized, kv_centroids[..., :free, :], kv.sizes[..., :free])
    if factor is not None and call.heads_per_kv > 1:
        factor = factor.repeat_interleave(call.heads_per_kv, dim=1)
    rows = call.free_queries.take(call.q, 2)
    space = Space(factor, normalise=True, backend=backend, rough=not keep_coordinates)
    coordinates, labels = _cluster(rows, space, sizes.query_groups, steps, query_start)
    query = backend.sort_groups(_spread(labels, call.free_queries, call.q.shape[2]), sizes.query_groups)
    means = backend.group_means(call.q, query)  # [B, H, Cq, D]
    query_centroids = keep_empty(
        means, query, _first_rows(rows, sizes.query_groups, None) if query_start is None else query_start
    )
    # dropped if not needed: they are as large as q, and only stratified probes use them
    kept = coordinates if keep_coordinates else coordinates.new_empty(0)
    return Grouping(query, kv, query_centroids, kv_centroids, kept, pinned_groups, key_factor, factor)


def _cluster(
    x: Tensor, space: Space, groups: int, steps: int, start: Tensor | None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Coordinates [B, H, N, R] and labels [B, H, N] of the rows of x [B, H, N, D]."""
    batch, heads = x.shape[:2]
    coordinates = space.coordinates(x)
    if valid is not None:
        valid = valid[:, None].expand(batch, heads, -1).flatten(0, 1)
    centres = None if start is None else space.coordinates(start.to(x.dtype)).flatten(0, 1)
    flat = coordinates.flatten(0, 1)
    labels = kmeans_labels(flat, groups, steps, start=centres, valid=valid, backend=space.backend)
    return coordinates, labels.unflatten(0, (batch, heads))


def _kv_partition(call: Call, labels: Tensor, groups: int, backend: Backend) -> tuple[Partition, int]:
    """Free keys in their groups, pinned keys in one more group after them, padding in no group."""
    labels = _spread(labels, call.free_keys, call.k.shape[2])
    if not call.pinned_keys.count:
        return backend.sort_groups(labels, groups), 0
    for start, stop in call.pinned_keys.ranges:
        labels[..., start:stop] = groups
    if call.key_mask is not None:
        labels = torch.where(call.key_mask[:, None], labels, -1)
    return backend.sort_groups(labels, groups + 1), 1


def _spread(labels: Tensor, rows: Rows, total: int) -> Tensor:
    """Labels of some rows as labels of all tokens; the others get -1.  # [B, H, total]"""
    if rows.count == total:
        return labels
    spread = labels.new_full((*labels.shape[:-1], total), -1)
    done = 0
    for start, stop in rows.ranges:
        spread[..., start:stop] = labels[..., done : done + stop - start]
        done += stop - start
    return spread


def keep_empty(means: Tensor, partition: Partition, start: Tensor) -> Tensor:
    """Centroids in which an empty group stays at its `start` [B, H, C, D].

    means [B, H, C or more, D]: pinned groups, which have no start, come last
    """
    groups = start.shape[2]
    filled = torch.where(partition.sizes[..., :groups, None] > 0, means[..., :groups, :], start.float())
    return torch.cat([filled, means[..., groups:, :]], dim=-2) if means.shape[-2] > groups else filled


def _first_rows(rows: Tensor, groups: int, valid: Tensor | None) -> Tensor:
    """Start of the groups in a first call: rows of the sequence.  # [B, H, C, D]"""
    if valid is not None:
        valid = valid[:, None].expand(rows.shape[:3]).flatten(0, 1)
    shape = (rows.shape[0] * rows.shape[1], rows.shape[2])
    index = first_rows(shape, groups, valid, rows.device).view(*rows.shape[:2], groups)
    return torch.take_along_dim(rows, index[..., None], dim=2)

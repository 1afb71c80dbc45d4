"""The expansion of what is skipped around the anchors (docs/method.md, "Anchored reconstruction"): which skipped groups
share a slot, mean key and value of every slot at its anchor, and how they drift as a row leaves the anchor."""

import torch
from torch import Tensor

from ...ops.backend import Backend
from ...types import Drift, HeadCost, Partition, SummaryKeys
from ..grouping.partition import kmeans_labels
from ..stages import GroupedCall, Routing, Scatter, SizedCall, Slots

NEIGHBOUR_STEPS = 8  # of k-means over the K/V centroids
SAMPLE = 512  # rows that show how queries leave their anchors and keys their centroids


def assign_slots(grouped: GroupedCall, routing: Routing) -> Slots:
    """A slot for each of the heaviest skipped groups, and some that the others share; none in heads without a
    summary."""
    grouping, sizes = grouped.grouping, grouped.sizes
    assert routing.log_mass is not None and routing.without_summary is not None
    near = neighbours(grouped)  # [B, Hkv, Ck]
    log_mass, cells, summarised = routing.log_mass, routing.route.cells, ~routing.without_summary
    index, mass, share = grouped.backend.choose_slots(
        log_mass, cells, grouping.query, grouping.kv, near, sizes.single_slots, sizes.merged_slots, summarised
    )
    return Slots(index, mass, share, near, sizes.single_slots)


def neighbours(grouped: GroupedCall) -> Tensor:
    """K/V groups sorted into as many neighbourhoods as there are merged slots, by their centroids.
    # [B, Hkv, Ck] int64"""
    centroids, count = grouped.grouping.kv_centroids, grouped.sizes.merged_slots
    batch, heads, groups, _ = centroids.shape
    if not count:  # every group has a slot of its own
        return torch.zeros(batch, heads, groups, dtype=torch.long, device=centroids.device)
    labels = kmeans_labels(centroids.flatten(0, 1), count, NEIGHBOUR_STEPS, backend=grouped.backend)
    return labels.unflatten(0, (batch, heads))


def measure_scatter(grouped: GroupedCall) -> Scatter:
    """How far tokens are from the middle of their groups, measured on samples."""
    call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
    return Scatter(
        _second_moment(call.q, grouping.query, grouping.anchors, backend),
        _second_moment(call.k, grouping.kv, grouping.kv_centroids, backend),
    )


def expand(grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
    """One summary key per slot: exact at the anchor, correct to first order around it."""
    call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
    # before the slots: on a GPU its kernel also writes the values in group order, which the slots then read
    moving = drift(grouped, slots, routing.scatter) if grouped.sizes.drift_rank else None
    keys, values, weight = backend.slot_summary(
        grouping.anchors, call.k, call.v, grouping.kv, slots.index, slots.log_mass, call.scale, slots.near, slots.single
    )
    return SummaryKeys(keys, values, weight, moving)


def drift(grouped: GroupedCall, slots: Slots, scatter: Scatter | None = None) -> Drift:
    """What the slots of a query group have in common: Cov(v, k) and Var(k) of the skipped keys, by their
    mass, in the directions in which both queries and keys vary most."""
    call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
    heads, shares = call.k.shape[1], call.heads_per_kv
    to_query, to_key = directions(grouped, scatter)  # [B, Hkv, D, R] each

    def by_keys(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads, shares)).flatten(2, 3)  # [B, Hkv, shares * Cq, ...]

    given = (call.k, to_key, call.v, grouping.kv, grouping.kv_centroids)
    merged = slots.log_mass.shape[-1] - slots.single
    if merged:
        together = slots.log_mass.softmax(-1).nan_to_num(0.0)[..., slots.single :]  # [B, H, Cq, merged]
        free = grouping.kv.groups - grouping.pinned_groups  # pinned keys are never skipped
        slope, curve = backend.skipped_covariance(
            by_keys(slots.share), *given, by_keys(together), slots.near, free, grouped.rules.pools_covariances
        )
    else:
        slope, curve = backend.skipped_covariance(by_keys(slots.share), *given)

    def per_head(x: Tensor) -> Tensor:
        return x.unflatten(2, (shares, -1)).flatten(1, 2)

    origin = backend.matmul(grouping.anchors, to_query.repeat_interleave(shares, dim=1))  # [B, H, Cq, R]
    return Drift(to_query, origin, per_head(0.5 * curve), per_head(slope))


def drift_cost(sized: SizedCall) -> HeadCost:
    """What finding the drift and following it costs a head."""
    call, sizes = sized.call, sized.sizes
    rank, merged = sizes.drift_rank, sizes.merged_slots
    product = call.v.shape[3] / (call.q.shape[3] + call.v.shape[3])  # of a coordinate and a value, in pairs
    # inside the pools or every group, and among the groups of each pool
    inside = merged if merged and sized.rules.pools_covariances else sizes.kv_groups
    mixing = sizes.query_groups * (inside + merged) * rank * product
    return HeadCost(call.free_queries.count * rank + mixing, rank / call.heads_per_kv)


def directions(grouped: GroupedCall, scatter: Scatter | None = None) -> tuple[Tensor, Tensor]:
    """Maps of queries and of keys to coordinates with y_q . y_k = scale * (q - anchor) . (k - centroid), as
    far as `Sizes.drift_rank` directions go; the keys' coordinates have unit variance.  # [B, Hkv, D, R] fp32 each"""
    call = grouped.call
    scatter = scatter or measure_scatter(grouped)
    spread = scatter.queries.unflatten(1, (call.k.shape[1], call.heads_per_kv)).mean(2)
    return grouped.backend.shared_directions(spread, scatter.keys, grouped.sizes.drift_rank, call.scale)


def _second_moment(x: Tensor, partition: Partition, centroids: Tensor, backend: Backend) -> Tensor:
    """Second moment of the rows of x [B, H, N, D] around the centroids of their groups, from a sample that
    is spread over the groups.  # [B, H, D, D] fp64"""
    count = min(SAMPLE, x.shape[2])
    grouped = partition.offsets[..., -1:]  # rows of no group come last in the order
    place = torch.arange(count, device=x.device) * grouped.clamp(min=count) // count  # [B, H, count], distinct
    index = partition.order.gather(-1, place)
    group = partition.labels.gather(-1, index).clamp(min=0)
    off = backend.gather_rows(x, index).float() - backend.gather_rows(centroids, group)
    return backend.second_moment(off, place < grouped, centred=False)

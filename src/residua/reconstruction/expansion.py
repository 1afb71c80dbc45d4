"""The expansion of what is skipped around the anchors (docs/method.md, "Anchored reconstruction"): mean key
and value of every slot at its anchor, and how they drift as a row leaves the anchor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..execution.backend import Backend
from ..types import Call, Drift, Grouping, Partition, SummaryKeys
from .slots import Slots

SAMPLE = 512  # rows that show how queries leave their anchors and keys their centroids


def expand(call: Call, grouping: Grouping, slots: Slots, rank: int, backend: Backend) -> SummaryKeys:
    """One extra key per slot that is exact at the anchor, to first order around it."""
    anchors = grouping.anchors
    # first, because it is content to see every value once
    moving = drift(call, grouping, slots, rank, backend) if rank else None
    keys, values, weight = backend.slot_summary(
        anchors, call.k, call.v, grouping.kv, slots.index, slots.log_mass, call.scale,
        slots.near, slots.single,
    )  # fmt: skip
    return SummaryKeys(keys, values, weight, moving)


def drift(call: Call, grouping: Grouping, slots: Slots, rank: int, backend: Backend) -> Drift:
    """What the slots of a query group have in common: Cov(v, k) and Var(k) of the skipped keys, by their
    mass, in the `rank` directions in which both queries and keys vary most."""
    heads, shares = call.k.shape[1], call.shares
    to_query, to_key = directions(call, grouping, rank, backend)  # [B, Hkv, D, R] each
    share = slots.share.unflatten(1, (heads, shares)).flatten(2, 3)  # [B, Hkv, shares * Cq, Ck]
    slope, curve = backend.mixed_covariance(share, call.k, to_key, call.v, grouping.kv, grouping.kv_centroids)

    def per_head(x: Tensor) -> Tensor:
        return x.unflatten(2, (shares, -1)).flatten(1, 2)

    origin = backend.matmul(grouping.anchors, to_query.repeat_interleave(shares, dim=1))  # [B, H, Cq, R]
    return Drift(to_query, origin, per_head(0.5 * curve), per_head(slope))


def directions(call: Call, grouping: Grouping, rank: int, backend: Backend) -> tuple[Tensor, Tensor]:
    """Maps of queries and of keys to coordinates with y_q . y_k = scale * (q - anchor) . (k - centroid), as
    far as `rank` directions go; the keys' coordinates have unit variance.  # [B, Hkv, D, R] fp32 each"""
    spread = _spread(call.q, grouping.query, grouping.anchors, backend)  # [B, H, D, D]
    spread = spread.unflatten(1, (call.k.shape[1], call.shares)).mean(2)
    cov = _spread(call.k, grouping.kv, grouping.kv_centroids, backend)  # [B, Hkv, D, D]
    return backend.shared_directions(spread, cov, rank, call.scale)


def _spread(x: Tensor, partition: Partition, centroids: Tensor, backend: Backend) -> Tensor:
    """Second moment of the rows of x [B, H, N, D] around the centroids of their groups, from a sample that
    is spread over the groups.  # [B, H, D, D] fp64"""
    count = min(SAMPLE, x.shape[2])
    grouped = partition.offsets[..., -1:]  # rows of no group come last in the order
    place = (
        torch.arange(count, device=x.device) * grouped.clamp(min=count) // count
    )  # [B, H, count], distinct
    index = partition.order.gather(-1, place)
    group = partition.labels.gather(-1, index).clamp(min=0)
    off = backend.gather_rows(x, index).float() - backend.gather_rows(centroids, group)
    return backend.second_moment(off, place < grouped, centred=False)

"""Which skipped K/V groups of a query group share a summary key. The heaviest have one each; the
others are merged with their neighbours, so that a row never sees more than a fixed number of summary keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..grouping.kmeans import kmeans_labels
from ..stages import GroupedCall, Routing

NEIGHBOUR_STEPS = 8  # of k-means over the K/V centroids


@dataclass(frozen=True)
class Slots:
    """Slot `index[a, b]` of query group a stands for K/V group b, among others; -1: b is kept, or empty."""

    index: Tensor  # [B, H, Cq, Ck] int32
    log_mass: Tensor  # [B, H, Cq, T] fp32, of all keys in the slot at the anchor; -inf where it is empty
    share: Tensor  # [B, H, Cq, Ck] fp32, of the skipped mass of query group a; 0 where b is not skipped
    near: Tensor  # [B, Hkv, Ck] int64: a group that has no slot of its own is in slot `single + near`
    single: int  # slots below hold one K/V group each


def assign_slots(grouped: GroupedCall, routing: Routing) -> Slots:
    """A slot for each of the heaviest skipped groups, and some that the others share; none in heads without a
    summary."""
    grouping, sizes = grouped.grouping, grouped.sizes
    assert routing.log_mass is not None and routing.bare is not None
    near = neighbours(grouped)  # [B, Hkv, Ck]
    index, mass, share = grouped.backend.choose_slots(
        routing.log_mass,
        routing.route.cells,
        grouping.query,
        grouping.kv,
        near,
        sizes.single_slots,
        sizes.merged_slots,
        ~routing.bare,
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

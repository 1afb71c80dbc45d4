"""Which skipped K/V groups of a query group share a summary key. The heaviest have one each; the
others are merged with their neighbours, so that a row never sees more than a fixed number of summary keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grouping.kmeans import kmeans_labels
from ..stages import GroupedCall, Routing, Slots

NEIGHBOUR_STEPS = 8  # of k-means over the K/V centroids


def assign_slots(grouped: GroupedCall, routing: Routing) -> Slots:
    """A slot for each of the heaviest skipped groups, and some that the others share; none in heads without a
    summary."""
    grouping, sizes = grouped.grouping, grouped.sizes
    assert routing.log_mass is not None and routing.without_summary is not None
    near = neighbours(grouped)  # [B, Hkv, Ck]
    index, mass, share = grouped.backend.choose_slots(
        routing.log_mass,
        routing.route.cells,
        grouping.query,
        grouping.kv,
        near,
        sizes.single_slots,
        sizes.merged_slots,
        ~routing.without_summary,
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

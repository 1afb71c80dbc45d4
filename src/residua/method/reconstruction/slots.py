"""Which skipped K/V groups of a query group share a summary key. The heaviest have one each; the
others are merged with their neighbours, so that a row never sees more than a fixed number of summary keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.backend import Backend
from ...types import Grouping, Route
from ..grouping.kmeans import kmeans_labels

NEIGHBOUR_STEPS = 8  # of k-means over the K/V centroids


@dataclass(frozen=True)
class Slots:
    """Slot `index[a, b]` of query group a stands for K/V group b, among others; -1: b is kept, or empty."""

    index: Tensor  # [B, H, Cq, Ck] int32
    log_mass: Tensor  # [B, H, Cq, T] fp32, of all keys in the slot at the anchor; -inf where it is empty
    share: Tensor  # [B, H, Cq, Ck] fp32, of the skipped mass of query group a; 0 where b is not skipped
    near: Tensor  # [B, Hkv, Ck] int64: a group that has no slot of its own is in slot `single + near`
    single: int  # slots below hold one K/V group each


def assign_slots(
    route: Route, grouping: Grouping, log_mass: Tensor, single: int, merged: int, wanted: Tensor, backend: Backend
) -> Slots:
    """`single` slots for the heaviest skipped groups, `merged` for all others; none in heads that are not
    wanted.

    log_mass [B, H, Cq, Ck], wanted [B, H] bool
    """
    near = neighbours(grouping, merged, backend)  # [B, Hkv, Ck]
    index, mass, share = backend.choose_slots(
        log_mass, route.cells, grouping.query, grouping.kv, near, single, merged, wanted
    )
    return Slots(index, mass, share, near, single)


def neighbours(grouping: Grouping, count: int, backend: Backend) -> Tensor:
    """K/V groups sorted into `count` neighbourhoods by their centroids.  # [B, Hkv, Ck] int64"""
    centroids = grouping.kv_centroids
    batch, heads, groups, _ = centroids.shape
    if not count:  # every group has a slot of its own
        return torch.zeros(batch, heads, groups, dtype=torch.long, device=centroids.device)
    labels = kmeans_labels(centroids.flatten(0, 1), count, NEIGHBOUR_STEPS, backend=backend)
    return labels.unflatten(0, (batch, heads))

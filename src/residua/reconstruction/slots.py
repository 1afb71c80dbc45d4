"""Which skipped K/V groups of a query group share an extra key. The heaviest stay for themselves; the
others are merged with their neighbours, so that a row never sees more than a fixed number of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..execution.backend import Backend
from ..grouping.kmeans import kmeans_labels
from ..types import Grouping, Route

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
    route: Route,
    grouping: Grouping,
    log_mass: Tensor,
    single: int,
    merged: int,
    wanted: Tensor,
    backend: Backend,
) -> Slots:
    """`single` slots for the heaviest skipped groups, `merged` for all others; none in heads that are not
    wanted.

    log_mass [B, H, Cq, Ck], wanted [B, H] bool
    """
    shares = log_mass.shape[1] // grouping.kv.offsets.shape[1]
    occupied = grouping.kv.sizes.repeat_interleave(shares, dim=1)[..., None, :] > 0
    skipped = ~route.cells & occupied & (grouping.query.sizes[..., None] > 0) & wanted[..., None, None]
    mass = torch.where(skipped, log_mass, -torch.inf)
    near = neighbours(grouping, merged, backend)  # [B, Hkv, Ck]
    index = (near.repeat_interleave(shares, dim=1) + single)[..., None, :].expand_as(mass)
    heaviest = mass.topk(min(single, mass.shape[-1]), dim=-1).indices  # [B, H, Cq, single]
    index = index.scatter(
        -1, heaviest, torch.arange(heaviest.shape[-1], device=mass.device).expand_as(heaviest)
    )
    index = torch.where(skipped, index, single + merged)  # a spare last slot for what is kept

    top = mass.new_full((*mass.shape[:-1], single + merged + 1), -torch.inf)
    top = top.scatter_reduce(-1, index, mass, "amax")
    safe = torch.where(top.isinf(), 0.0, top)
    weight = (mass - safe.gather(-1, index)).exp()
    total = torch.zeros_like(top).scatter_add_(-1, index, weight)
    slot_mass = (total.log() + safe)[..., : single + merged]
    everything = slot_mass.logsumexp(-1, keepdim=True)
    share = torch.where(skipped, (mass - everything).exp(), 0.0)
    index = torch.where(skipped, index, -1).to(torch.int32)
    return Slots(index, slot_mass, share, near, single)


def neighbours(grouping: Grouping, count: int, backend: Backend) -> Tensor:
    """K/V groups sorted into `count` neighbourhoods by their centroids.  # [B, Hkv, Ck] int64"""
    centroids = grouping.kv_centroids
    batch, heads, groups, _ = centroids.shape
    if not count:  # every group has a slot of its own
        return torch.zeros(batch, heads, groups, dtype=torch.long, device=centroids.device)
    labels = kmeans_labels(centroids.flatten(0, 1), count, NEIGHBOUR_STEPS, backend=backend)
    return labels.unflatten(0, (batch, heads))

"""The tail, a simple relative of anchored reconstruction: a skipped K/V group enters through its size, its
key centroid and its value centroid, without anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..execution.backend import Backend
from ..execution.plain.chunks import chunk_rows
from ..routing import centroid_mass
from ..types import Call, Grouping, HeadCost, Partition, SummaryKeys
from .base import RECONSTRUCTIONS, GroupedCall, Routing
from .slots import Slots
from .summarised import Summarised

SMALL_SCALE = 1e-6  # of scores: below, a group's size would be a huge number in units of it


@RECONSTRUCTIONS.register
class Tail(Summarised):
    """See the table of reconstructions in docs/method.md."""

    name = "tail"
    about = "skipped groups enter through their sizes, key centroids and value centroids"

    def summary_costs(self, grouped: GroupedCall) -> dict[str, HeadCost]:
        sizes, rows = grouped.sizes, grouped.call.free_queries.count
        slots = sizes.single_slots + sizes.merged_slots
        return {"summary": HeadCost(rows * slots + sizes.query_groups * sizes.kv_groups)}

    def slot_mass(self, grouped: GroupedCall, log_mass: Tensor) -> Tensor:
        return centroid_mass(grouped.call, grouped.grouping, grouped.backend)

    def summary_keys(
        self, grouped: GroupedCall, routing: Routing, slots: Slots, slot_mass: Tensor
    ) -> SummaryKeys:
        return merge_centroids(grouped.call, grouped.grouping, slots, slot_mass, grouped.backend)


def merge_centroids(
    call: Call, grouping: Grouping, slots: Slots, log_mass: Tensor, backend: Backend
) -> SummaryKeys:
    """Summary keys from centroids, weighted by their mass where several share a slot.

    Args:
        call: The call.
        grouping: Its groups.
        slots: Which skipped groups share a slot.
        log_mass: [B, H, Cq, Ck] as from `centroid_mass`.
        backend: Computes the means of the values.

    Returns:
        One key per slot, without drift.
    """
    means = backend.group_means(call.v, grouping.kv)
    if backend.adds_by_slot and abs(call.scale) > SMALL_SCALE:
        keys, values = _merge_at_once(call, grouping, slots, means, backend)
    else:
        keys, values = _merge(call, grouping, slots, log_mass, means)
    at_anchor = backend.matmul(grouping.anchors[..., None, :], keys.mT)[..., 0, :]
    return SummaryKeys(keys, values, slots.log_mass - call.scale * at_anchor)


def _merge_at_once(
    call: Call, grouping: Grouping, slots: Slots, means: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Each centroid as a group of one key. Its size enters the score through one more channel, in which all
    anchors are 1."""
    batch, heads, groups, _ = grouping.kv_centroids.shape
    size = grouping.kv.sizes.clamp(min=1).float().log() / call.scale  # of an empty group: in no slot
    keys = torch.cat([grouping.kv_centroids, size[..., None]], -1)
    anchors = torch.nn.functional.pad(grouping.anchors, (0, 1), value=1.0)
    order = torch.arange(groups + 1, device=keys.device).expand(batch, heads, -1)
    alone = Partition(order[..., :-1], order[..., :-1], order)
    found, values = backend.slot_means(
        anchors, keys, means, alone, slots.index, slots.log_mass, call.scale, slots.near, slots.single
    )
    return found[..., :-1], values


def _merge(
    call: Call, grouping: Grouping, slots: Slots, log_mass: Tensor, means: Tensor
) -> tuple[Tensor, Tensor]:
    batch, heads, cq, groups = slots.index.shape
    count = slots.log_mass.shape[-1]
    keys = log_mass.new_zeros(batch, heads, cq, count + 1, call.k.shape[-1])
    values = log_mass.new_zeros(batch, heads, cq, count + 1, call.v.shape[-1])
    index = slots.index.long() % (count + 1)  # -1 becomes the spare last slot
    padded = slots.log_mass.new_full((batch, heads, cq, count + 1), float("inf"))
    padded[..., :count] = slots.log_mass
    weight = (log_mass - padded.gather(-1, index)).exp()  # 0 in the spare slot
    widest = max(keys.shape[-1], values.shape[-1], count + 1)
    step = chunk_rows(4 * batch * heads * groups * widest, cq)
    for source, sums in ((grouping.kv_centroids, keys), (means, values)):
        source = source.repeat_interleave(call.shares, dim=1)[..., None, :, :]  # [B, H, 1, Ck, D]
        for first in range(0, cq, step):
            part = slice(first, first + step)
            sums[:, :, part] = _add_by_slot(weight[:, :, part], source, index[:, :, part], count + 1)
    return keys[..., :count, :], values[..., :count, :]


def _add_by_slot(weight: Tensor, source: Tensor, index: Tensor, slots: int) -> Tensor:
    """Weighted sums of what shares a slot, always added in the same order.

    weight and index [B, H, M, Ck], source [B, H, 1, Ck, D] -> [B, H, M, slots, D]
    """
    if weight.device.type == "cpu":
        terms = weight[..., None] * source
        sums = terms.new_zeros(*terms.shape[:3], slots, terms.shape[-1])
        return sums.scatter_add_(-2, index[..., None].expand_as(terms), terms)
    # on a GPU scatter_add_ adds in any order; a product does not
    slot = torch.arange(slots, device=index.device)[:, None]
    return torch.where(index[..., None, :] == slot, weight[..., None, :], 0.0) @ source

"""The tail, a simple relative of anchored reconstruction: a skipped K/V group enters through its size, its
key centroid and its value centroid, without anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..execution.backend import Backend
from ..execution.plain.chunks import chunk_rows
from ..routing import centroid_mass
from ..types import Call, Grouping, HeadCost, SummaryKeys
from .base import RECONSTRUCTIONS, GroupedCall
from .slots import Slots
from .summarised import Summarised


@RECONSTRUCTIONS.register
class Tail(Summarised):
    """See docs/method.md, "The tail"."""

    name = "tail"
    about = "skipped groups enter through their sizes, key centroids and value centroids"

    def summary_costs(self, grouped: GroupedCall) -> dict[str, HeadCost]:
        sizes, rows = grouped.sizes, grouped.call.free_queries.count
        slots = sizes.single_slots + sizes.merged_slots
        return {"summary": HeadCost(rows * slots + sizes.query_groups * sizes.kv_groups)}

    def slot_mass(self, grouped: GroupedCall, log_mass: Tensor) -> Tensor:
        return centroid_mass(grouped.call, grouped.grouping, grouped.backend)

    def summary_keys(self, grouped: GroupedCall, slots: Slots, slot_mass: Tensor) -> SummaryKeys:
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
    batch, heads, cq, groups = slots.index.shape
    count = slots.log_mass.shape[-1]
    means = backend.group_means(call.v, grouping.kv)
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
    keys, values = keys[..., :count, :], values[..., :count, :]
    at_anchor = backend.matmul(grouping.anchors[..., None, :], keys.mT)[..., 0, :]
    log_weight = slots.log_mass - call.scale * at_anchor
    return SummaryKeys(keys, values, log_weight)


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

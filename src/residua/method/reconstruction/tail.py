"""The tail, a simple relative of anchored reconstruction: a skipped K/V group enters through one key and
value in its middle. Nothing is computed at the anchors: there can be many of them, and many small groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.device import chunk_rows
from ...types import Drift, HeadCost, Partition, SummaryKeys
from ..route import keep_broken
from ..stages import GroupedCall, Routing, SizedCall
from .base import RECONSTRUCTIONS
from .centres import Centres, centres_cost
from .expansion import Scatter, drift, drift_cost
from .slots import Slots
from .summarised import Summarised

SMALL_SCALE = 1e-6  # of scores: below, a group's size would be a huge number in units of it


@RECONSTRUCTIONS.register
class Tail(Summarised):
    """See the table of reconstructions in docs/method.md."""

    name = "tail"
    about = "skipped groups enter through one key and value in their middle"

    def routing_cost(self, sized: SizedCall) -> HeadCost:
        return centres_cost(sized)

    def score(self, grouped: GroupedCall) -> tuple[Tensor, Centres]:
        centres = Centres.of(grouped)
        return keep_broken(grouped.call, grouped.grouping, centres.log_mass(grouped)), centres

    def summary_costs(self, sized: SizedCall) -> dict[str, HeadCost]:
        sizes, rows = sized.sizes, sized.call.free_queries.count
        slots = sizes.single_slots + sizes.merged_slots
        costs = {"summary": HeadCost(rows * slots + sizes.query_groups * sizes.kv_groups)}
        return costs | ({"covariances": drift_cost(sized)} if _drifts(sized) else {})

    def scatter(self, grouped: GroupedCall) -> Scatter | None:
        if not _drifts(grouped):
            return None
        return Scatter.of(grouped)

    def summary_keys(self, grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
        moving = drift(grouped, slots, routing.scatter) if _drifts(grouped) else None
        return merge_centres(grouped, routing, slots, moving)


def _drifts(sized: SizedCall) -> bool:
    return sized.sizes.drift_rank > 0 and sized.rules.drifts_centres


def merge_centres(grouped: GroupedCall, routing: Routing, slots: Slots, moving: Drift | None = None) -> SummaryKeys:
    """Summary keys from centres, weighted by their mass where several share a slot; `moving` says how they
    change from row to row."""
    call, anchors, backend = grouped.call, grouped.grouping.anchors, grouped.backend
    merge = _merge_at_once if backend.adds_by_slot and abs(call.scale) > SMALL_SCALE else _merge
    keys, values = merge(grouped, routing, slots)
    at_anchor = backend.matmul(anchors[..., None, :], keys.mT)[..., 0, :]
    return SummaryKeys(keys, values, slots.log_mass - call.scale * at_anchor, moving)


def _merge_at_once(grouped: GroupedCall, routing: Routing, slots: Slots) -> tuple[Tensor, Tensor]:
    """Each centre as a group of one key. Its size enters the score through one more channel, in which all
    anchors are 1."""
    call, grouping, centres = grouped.call, grouped.grouping, routing.centres
    assert centres is not None
    batch, heads, groups, _ = centres.keys.shape
    size = torch.where(grouping.kv.sizes > 0, centres.log_size / call.scale, 0.0)  # empty: in no slot
    keys = torch.cat([centres.keys, size[..., None]], -1)
    anchors = torch.nn.functional.pad(grouping.anchors, (0, 1), value=1.0)
    order = torch.arange(groups + 1, device=keys.device).expand(batch, heads, -1)
    alone = Partition(order[..., :-1], order[..., :-1], order)
    found, values, _ = grouped.backend.slot_summary(
        anchors, keys, centres.values, alone, slots.index, slots.log_mass, call.scale, slots.near, slots.single
    )
    return found[..., :-1], values


def _merge(grouped: GroupedCall, routing: Routing, slots: Slots) -> tuple[Tensor, Tensor]:
    call, centres, log_mass = grouped.call, routing.centres, routing.log_mass
    assert centres is not None and log_mass is not None
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
    add = _add_by_index if grouped.rules.adds_in_order else _add_by_product
    for source, sums in ((centres.keys, keys), (centres.values, values)):
        source = source.repeat_interleave(call.shares, dim=1)[..., None, :, :]  # [B, H, 1, Ck, D]
        for first in range(0, cq, step):
            part = slice(first, first + step)
            sums[:, :, part] = add(weight[:, :, part], source, index[:, :, part], count + 1)
    return keys[..., :count, :], values[..., :count, :]


def _add_by_index(weight: Tensor, source: Tensor, index: Tensor, slots: int) -> Tensor:
    """Weighted sums of what shares a slot.

    weight and index [B, H, M, Ck], source [B, H, 1, Ck, D] -> [B, H, M, slots, D]
    """
    terms = weight[..., None] * source
    sums = terms.new_zeros(*terms.shape[:3], slots, terms.shape[-1])
    return sums.scatter_add_(-2, index[..., None].expand_as(terms), terms)


def _add_by_product(weight: Tensor, source: Tensor, index: Tensor, slots: int) -> Tensor:
    """The same, always added in the same order, where `scatter_add_` is not."""
    source = torch.nan_to_num(source, 0.0, 0.0, 0.0)  # of groups that are kept: 0 times NaN would reach every slot
    slot = torch.arange(slots, device=index.device)[:, None]
    return torch.where(index[..., None, :] == slot, weight[..., None, :], 0.0) @ source

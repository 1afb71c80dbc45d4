"""The tail, a simple relative of anchored reconstruction: a skipped K/V group enters through one key and
value in its middle. Nothing is computed at the anchors: there can be many of them, and many small groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.backend import Backend
from ...ops.plain.chunks import chunk_rows
from ...types import Call, Drift, Grouping, HeadCost, Partition, SummaryKeys
from ..route import keep_broken
from .base import RECONSTRUCTIONS, GroupedCall, Routing
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

    def routing_cost(self, grouped: GroupedCall) -> HeadCost:
        return centres_cost(grouped.call, grouped.groups)

    def score(self, grouped: GroupedCall) -> tuple[Tensor, Centres]:
        call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
        centres = Centres.of(call, grouping, backend)
        return keep_broken(call, grouping, centres.log_mass(call, grouping, backend)), centres

    def summary_costs(self, grouped: GroupedCall) -> dict[str, HeadCost]:
        sizes, rows = grouped.sizes, grouped.call.free_queries.count
        slots = sizes.single_slots + sizes.merged_slots
        costs = {"summary": HeadCost(rows * slots + sizes.query_groups * sizes.kv_groups)}
        return costs | ({"covariances": drift_cost(grouped.call, sizes)} if _drifts(grouped) else {})

    def scatter(self, grouped: GroupedCall) -> Scatter | None:
        if not _drifts(grouped):
            return None
        return Scatter.of(grouped.call, grouped.grouping, grouped.backend)

    def summary_keys(self, grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
        call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
        assert routing.centres is not None and routing.log_mass is not None
        moving = None
        if _drifts(grouped):
            moving = drift(call, grouping, slots, grouped.sizes.drift_rank, backend, routing.scatter)
        return merge_centres(call, grouping, slots, routing.log_mass, routing.centres, backend, moving)


def _drifts(grouped: GroupedCall) -> bool:
    """A GPU, which launches as little as it can, does without the drift."""
    return grouped.sizes.drift_rank > 0 and grouped.call.q.device.type == "cpu"


def merge_centres(
    call: Call,
    grouping: Grouping,
    slots: Slots,
    log_mass: Tensor,
    centres: Centres,
    backend: Backend,
    moving: Drift | None = None,
) -> SummaryKeys:
    """Summary keys from centres, weighted by their mass where several share a slot.

    Args:
        call: The call.
        grouping: Its groups.
        slots: Which skipped groups share a slot.
        log_mass: [B, H, Cq, Ck] as from `Centres.log_mass`.
        centres: One key and value for each K/V group.
        backend: Adds them up.
        moving: How the summary keys change from row to row.

    Returns:
        One key per slot.
    """
    if backend.adds_by_slot and abs(call.scale) > SMALL_SCALE:
        keys, values = _merge_at_once(call, grouping, slots, centres, backend)
    else:
        keys, values = _merge(call, slots, log_mass, centres)
    at_anchor = backend.matmul(grouping.anchors[..., None, :], keys.mT)[..., 0, :]
    return SummaryKeys(keys, values, slots.log_mass - call.scale * at_anchor, moving)


def _merge_at_once(
    call: Call, grouping: Grouping, slots: Slots, centres: Centres, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Each centre as a group of one key. Its size enters the score through one more channel, in which all
    anchors are 1."""
    batch, heads, groups, _ = centres.keys.shape
    size = torch.where(grouping.kv.sizes > 0, centres.log_size / call.scale, 0.0)  # empty: in no slot
    keys = torch.cat([centres.keys, size[..., None]], -1)
    anchors = torch.nn.functional.pad(grouping.anchors, (0, 1), value=1.0)
    order = torch.arange(groups + 1, device=keys.device).expand(batch, heads, -1)
    alone = Partition(order[..., :-1], order[..., :-1], order)
    found, values = backend.slot_means(
        anchors, keys, centres.values, alone, slots.index, slots.log_mass, call.scale, slots.near, slots.single
    )
    return found[..., :-1], values


def _merge(call: Call, slots: Slots, log_mass: Tensor, centres: Centres) -> tuple[Tensor, Tensor]:
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
    for source, sums in ((centres.keys, keys), (centres.values, values)):
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

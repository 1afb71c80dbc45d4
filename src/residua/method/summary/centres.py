"""What the keys of a K/V group amount to where nothing is computed for its query groups: one key and value in
the middle of the group, and how many keys it counts for."""

import torch
from torch import Tensor

from ...ops.matrices import chunk_rows
from ...types import Call, Drift, Grouping, HeadCost, Partition, SummaryKeys
from ..route import keep_broken, mass_at_anchors
from ..stages import Centres, GroupedCall, Routing, SizedCall, Slots

SMALL_SCALE = 1e-6  # of scores: below, a group's size would be a huge number in units of it


def find_centres(grouped: GroupedCall) -> Centres:
    """The centres of all K/V groups. Their keys count by their softmax weights for the mean query, or all alike
    (`Rules.weighs_centres`)."""
    call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
    if not grouped.rules.weighs_centres:
        values = backend.group_means(call.v, grouping.kv)
        return Centres(grouping.kv_centroids, values, grouping.kv.sizes.float().log())
    middle = _mean_query(call, grouping)
    log_mass = backend.cell_mass(middle, call.k, grouping.kv, call.scale)[:, :, 0]  # [B, Hkv, Ck]
    label = grouping.kv.labels.clamp(min=0)  # padding: computed and dropped
    k, v = call.k.float(), call.v.float()
    weight = call.scale * backend.matmul(middle, k.mT)[:, :, 0] - log_mass.gather(-1, label)
    # the weights of a group sum to 1, and a mean over it divides by its size
    weight = (weight.exp() * grouping.kv.sizes.gather(-1, label))[..., None]
    keys, values = (backend.group_means(x * weight, grouping.kv) for x in (k, v))
    return Centres(keys, values, log_mass - call.scale * (middle * keys).sum(-1))


def centre_mass(grouped: GroupedCall, centres: Centres) -> Tensor:
    """Log of the mass of every centre at every anchor, NaN for groups that must be kept.  # [B, H, Cq, Ck] fp32"""
    return keep_broken(grouped, mass_at_anchors(grouped, centres.keys, centres.log_size))


def centres_cost(sized: SizedCall) -> HeadCost:
    """What finding the centres and their masses costs a head."""
    call, groups = sized.call, sized.groups
    product = call.q.shape[3] / (call.q.shape[3] + call.v.shape[3])  # as a share of a pair
    found = (1 + 2 * product) / call.heads_per_kv if sized.rules.weighs_centres else 0.0
    return HeadCost(fixed=groups[0] * groups[1] * product, per_key=found)


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
        source = source.repeat_interleave(call.heads_per_kv, dim=1)[..., None, :, :]  # [B, H, 1, Ck, D]
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


def _mean_query(call: Call, grouping: Grouping) -> Tensor:
    """The mean over all rows of the heads that share keys.  # [B, Hkv, 1, D] fp32"""
    size = grouping.query.sizes.float()[..., None]  # [B, H, Cq, 1]
    total = (grouping.anchors * size).sum(2).unflatten(1, (call.k.shape[1], call.heads_per_kv)).sum(2)
    rows = size.sum(2).unflatten(1, (call.k.shape[1], call.heads_per_kv)).sum(2).clamp(min=1)
    return (total / rows)[:, :, None]

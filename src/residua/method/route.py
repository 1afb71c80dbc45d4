"""Which cells are computed: the mass each is expected to hold, and an exact budget of query-key pairs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import Call, HeadCost, Route
from .stages import GroupedCall, Routing, SizedCall

PRIORITY_EVERY = 4  # keys in group order, of which at most one is looked at


def route_cells(grouped: GroupedCall) -> Routing:
    """The best cells that the pair budget of every head pays for."""
    if grouped.config.skips_nothing:
        return Routing(keep_all(grouped))
    log_mass = cell_scores(grouped)
    budget = pair_budget(grouped.call, grouped.allowed, grouped.sizes.probes)
    (cells,) = best_cells(grouped, log_mass, [budget])
    return Routing(route_over(grouped, cells), log_mass)


def cell_scores(grouped: GroupedCall) -> Tensor:
    """Log of the attention mass of every K/V group at the centroid of every query group, as `Config.score` says.

    "mass" measures it exactly over the group's keys; "centroid" treats all keys as if they lay at the group's
    centroid; "value-error" is "centroid" times the root mean square distance of the group's values from their
    mean, which is what a centroid cannot represent.
    -> [B, H, Cq, Ck] fp32, -inf for empty K/V groups, NaN for groups with NaN or Inf among their keys
    """
    call, grouping, score = grouped.call, grouped.grouping, grouped.config.score
    if score == "mass":
        mass = grouped.backend.cell_mass(grouping.anchors, call.k, grouping.kv, call.scale)
    else:
        kv = grouping.kv
        mass = mass_at_anchors(grouped, grouping.kv_centroids, kv.sizes.float().log())
    if score == "value-error":
        error = value_spread(grouped).repeat_interleave(call.heads_per_kv, dim=1)
        mass = mass + error.clamp(min=torch.finfo(torch.float32).tiny).log()[..., None, :]
    return keep_broken(grouped, mass)


def keep_broken(grouped: GroupedCall, log_mass: Tensor) -> Tensor:
    """NaN, which is always kept, for the groups with NaN or Inf among their keys: an infinite key may have no
    mass at the query centroid and still dominate a row.  # [B, H, Cq, Ck]"""
    broken = _broken_groups(grouped) & (grouped.grouping.kv.sizes > 0)
    return torch.where(broken.repeat_interleave(grouped.call.heads_per_kv, dim=1)[..., None, :], torch.nan, log_mass)


def _broken_groups(grouped: GroupedCall) -> Tensor:
    """K/V groups with NaN or Inf among their keys.  # [B, Hkv, Ck] bool"""
    call, grouping = grouped.call, grouped.grouping
    if call.broken_keys is None:
        return ~torch.isfinite(torch.linalg.vector_norm(grouping.kv_centroids, torch.inf, dim=-1))  # NaN stays NaN
    groups = grouping.kv.groups
    index = grouping.kv.labels.remainder(groups + 1)  # padding goes to a spare last group
    counts = torch.zeros(*index.shape[:2], groups + 1, dtype=torch.long, device=index.device)
    return counts.scatter_add_(-1, index, call.broken_keys.long())[..., :groups] > 0


def mass_at_anchors(grouped: GroupedCall, keys: Tensor, log_size: Tensor) -> Tensor:
    """Log of the mass at every anchor of one key per K/V group, each counted `log_size` times.

    keys [B, Hkv, Ck, D], log_size [B, Hkv, Ck] -> [B, H, Cq, Ck] fp32
    """
    call = grouped.call
    keys, log_size = (x.repeat_interleave(call.heads_per_kv, dim=1) for x in (keys, log_size))
    return call.scale * grouped.backend.matmul(grouped.grouping.anchors, keys.mT) + log_size[..., None, :]


def value_spread(grouped: GroupedCall) -> Tensor:
    """Root mean square distance of the values of each K/V group from their mean.  # [B, Hkv, Ck] fp32"""
    call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
    group = grouping.kv.labels.clamp(min=0)  # padding: computed and dropped
    off = call.v.float() - backend.gather_rows(backend.group_means(call.v, grouping.kv), group)
    return backend.group_means(off.square().sum(-1, keepdim=True), grouping.kv)[..., 0].sqrt()


def group_priority(grouped: GroupedCall) -> Tensor:
    """Log of the error that a unit of mass in a K/V group leaves if the group is skipped and summarised.

    A summary is right where all keys of a group score alike, or all its values are alike. What it misses
    grows with the distance of the keys from their centroid times that of the values from their mean (root
    mean squares, from a sample; docs/decisions/0018-routing-by-what-is-left.md). Relative to the other groups
    of the head; 0 where it is not known.  # [B, Hkv, Ck] fp32
    """
    call, kv = grouped.call, grouped.grouping.kv
    every, sample = PRIORITY_EVERY, grouped.rules.priority_keys
    if sample is not None:
        every = max(every, call.k.shape[2] // (sample * kv.groups))
    return grouped.backend.group_priority(call.k, call.v, kv, every)


def routing_cost(sized: SizedCall) -> HeadCost:
    """What scoring the cells of a head costs: D products of an anchor with a key, or with a key centroid."""
    call, (query_groups, kv_groups) = sized.call, sized.groups
    product = call.q.shape[3] / (call.q.shape[3] + call.v.shape[3])  # as a share of a pair
    if sized.config.score == "mass":
        return HeadCost(per_key=query_groups * product)
    return HeadCost(fixed=query_groups * kv_groups * product)


def pair_budget(call: Call, density: float | Tensor, probes: int) -> Tensor:
    """Pairs that are left for routed cells after probes, exact rows and pinned keys.

    density: one number or [B, H] -> [B] int64, or [B, H]
    """
    if isinstance(density, Tensor) and call.key_mask is None:
        # known from the shapes, so computed as plain numbers: a GPU then launches nothing for them
        whole, held = call.k.shape[2], call.pinned_keys.count
        spent = (probes + call.exact_queries.count) * whole + call.free_queries.count * held
        return (density * call.q.shape[2] * float(whole)).floor().long() - spent
    keys, pinned = call.valid_keys, call.valid_pinned_keys  # [B]
    if isinstance(density, Tensor):
        keys, pinned = keys[:, None], pinned[:, None]
    total = (density * call.q.shape[2] * keys.double()).floor().long()
    return total - (probes + call.exact_queries.count) * keys - call.free_queries.count * pinned


def keep_all(grouped: GroupedCall) -> Route:
    """Every cell that holds anything."""
    return route_over(grouped, _occupied(grouped))


def route_over(grouped: GroupedCall, cells: Tensor) -> Route:
    """The route over those cells [B, H, Cq, Ck] of the groups."""
    grouping = grouped.grouping
    return Route(grouping.query, grouping.kv, cells, grouping.pinned_groups)


def best_cells(
    grouped: GroupedCall,
    log_mass: Tensor,
    budgets: Sequence[Tensor],
    priority: Tensor | None = None,
    by_priority: int | None = None,
) -> Tensor:
    """Spends each of some budgets [B, H] of pairs on the cells of every head, as `Config.budget_scope` says. Every
    query group keeps the pinned keys. Groups with NaN or Inf among their keys are always kept, because dense
    attention would pass these on.

    Args:
        grouped: The call.
        log_mass: [B, H, Cq, Ck] as from `cell_scores`.
        budgets: The budgets.
        priority: [B, Hkv, Ck] as from `group_priority`; None: mass alone counts.
        by_priority: For how many of the budgets the priority counts, the first ones; None: for all.

    Returns:
        [budgets, B, H, Cq, Ck] bool.
    """
    call, grouping = grouped.call, grouped.grouping
    if priority is not None and call.heads_per_kv > 1:
        priority = priority.repeat_interleave(call.heads_per_kv, dim=1)  # [B, H, Ck]
    kv_sizes = grouping.kv.sizes.repeat_interleave(call.heads_per_kv, dim=1)  # [B, H, Ck]
    free = kv_sizes.shape[-1] - grouping.pinned_groups
    if grouped.config.budget_scope == "head":
        found = grouped.backend.best_cells(
            log_mass, grouping.query.sizes, kv_sizes, budgets, free, priority, by_priority
        )
    else:
        broken = log_mass.isnan()
        plain = torch.where(broken, -torch.inf, log_mass).log_softmax(-1)[..., :free]
        weighted = plain if priority is None else plain + priority[..., None, :free]
        counts = len(budgets) if by_priority is None else by_priority
        shares = [weighted if place < counts else plain for place in range(len(budgets))]
        sizes = grouping.query.sizes, kv_sizes[..., :free]
        found = torch.stack([_spend_per_group(x, *sizes, b) for x, b in zip(shares, budgets, strict=True)])
        found |= (broken & _occupied(grouped))[..., :free]
    if grouping.pinned_groups:
        pinned = _occupied(grouped)[..., free:]
        found = torch.cat([found, pinned.expand(len(budgets), *pinned.shape)], -1)
    return found


def _spend_per_group(log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
    """Keeps the best cells of each query group until it has seen its number of keys, the same for every
    group; the cell that crosses this number is kept.  # [B, H, Cq, Ck] bool"""
    keys = budget.double() / query_sizes.sum(-1).clamp(min=1)  # [B, H], keys per row
    score = torch.where(log_share.isnan(), torch.inf, log_share)
    order = torch.where(kv_sizes[..., None, :] > 0, score, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    sizes = kv_sizes[..., None, :].expand_as(order).gather(-1, order)
    before = sizes.cumsum(-1) - sizes
    taken = (before < keys[..., None, None].clamp(min=1)) & (sizes > 0)
    kept = torch.zeros_like(taken).scatter_(-1, order, taken)
    return kept & (query_sizes[..., None] > 0)


def _occupied(grouped: GroupedCall) -> Tensor:
    """Cells that hold anything.  # [B, H, Cq, Ck] bool"""
    grouping = grouped.grouping
    kv_sizes = grouping.kv.sizes.repeat_interleave(grouped.call.heads_per_kv, dim=1)
    return (grouping.query.sizes[..., :, None] > 0) & (kv_sizes[..., None, :] > 0)

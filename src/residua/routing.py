"""Which cells are computed: the mass each is expected to hold, and an exact budget of query-key pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .execution.backend import Backend
from .types import Call, Grouping, HeadCost, Route


def cell_scores(call: Call, grouping: Grouping, score: str, backend: Backend) -> Tensor:
    """Log of the attention mass of every K/V group at the centroid of every query group.

    "mass" measures it exactly over the group's keys; "centroid" takes the group's centroid for all of them.
    -> [B, H, Cq, Ck] fp32, -inf for empty K/V groups, NaN for groups with NaN or Inf among their keys
    """
    sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)[..., None, :]
    if score == "mass":
        mass = backend.cell_mass(grouping.anchors, call.k, grouping.kv, call.scale)
    else:
        mass = centroid_mass(call, grouping)
    # an infinite key may weigh nothing at a centroid and still decide a row
    largest = torch.linalg.vector_norm(grouping.kv_centroids, torch.inf, dim=-1)  # NaN stays NaN
    broken = ~torch.isfinite(largest).repeat_interleave(call.shares, dim=1)[..., None, :] & (sizes > 0)
    return torch.where(broken, torch.nan, mass)


def centroid_mass(call: Call, grouping: Grouping) -> Tensor:
    """Log of the mass that a K/V group would have at an anchor if all its keys lay at its centroid; -inf
    for an empty one.  # [B, H, Cq, Ck] fp32"""
    centroids = grouping.kv_centroids.repeat_interleave(call.shares, dim=1)  # [B, H, Ck, D]
    sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)
    return call.scale * grouping.anchors @ centroids.mT + sizes.log()[..., None, :]


def routing_cost(call: Call, score: str, groups: tuple[int, int]) -> HeadCost:
    """What scoring the cells of a head costs: D products of an anchor with a key, or with a key centroid.

    Args:
        call: The call.
        score: "mass" or "centroid".
        groups: Query groups and K/V groups.
    """
    product = call.q.shape[3] / (call.q.shape[3] + call.v.shape[3])  # of a pair
    if score == "mass":
        return HeadCost(per_key=groups[0] * product)
    return HeadCost(fixed=groups[0] * groups[1] * product)


def pair_budget(call: Call, density: float | Tensor, probes: int) -> Tensor:
    """Pairs that routed cells may use, after probes, exact rows and pinned keys are paid for.

    density: one number or [B, H] -> [B] int64, or [B, H]
    """
    keys, pinned = valid_keys(call), pinned_keys(call)  # [B]
    if isinstance(density, Tensor):
        keys, pinned = keys[:, None], pinned[:, None]
    total = (density * call.q.shape[2] * keys.double()).floor().long()
    return total - (probes + call.exact_queries.count) * keys - call.free_queries.count * pinned


def valid_keys(call: Call) -> Tensor:
    """Keys that are not padding.  # [B] int64"""
    if call.key_mask is None:
        return torch.full((call.k.shape[0],), call.k.shape[2], dtype=torch.long, device=call.k.device)
    return call.key_mask.sum(-1)


def pinned_keys(call: Call) -> Tensor:
    """Pinned keys that are not padding.  # [B] int64"""
    if call.key_mask is None:
        return torch.full((call.k.shape[0],), call.pinned_keys.count, dtype=torch.long, device=call.k.device)
    return call.pinned_keys.take(call.key_mask, 1).sum(-1)


def keep_all(call: Call, grouping: Grouping) -> Route:
    """Every cell that holds anything."""
    return Route(grouping.query, grouping.kv, _occupied(call, grouping), grouping.pinned_groups)


def keep_best(call: Call, grouping: Grouping, log_mass: Tensor, budget: Tensor, backend: Backend) -> Route:
    """Spends a budget [B, H] of pairs on the cells of every head; every query group keeps the pinned keys.

    log_mass [B, H, Cq, Ck] as from `cell_scores`
    """
    return keep_best_each(call, grouping, log_mass, [budget], backend)[0]


def keep_best_each(
    call: Call, grouping: Grouping, log_mass: Tensor, budgets: Sequence[Tensor], backend: Backend
) -> list[Route]:
    """`keep_best` for several budgets; the cells are ranked once."""
    # pinned groups are paid for already; their mass stays in the normaliser because it is a row's own
    broken = log_mass.isnan()
    log_share = torch.where(broken, -torch.inf, log_mass).log_softmax(-1)
    log_share = torch.where(broken, torch.nan, log_share)
    kv_sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)  # [B, H, Ck]
    free = kv_sizes.shape[-1] - grouping.pinned_groups
    found = backend.spend_each(log_share[..., :free], grouping.query.sizes, kv_sizes[..., :free], budgets)
    if grouping.pinned_groups:
        pinned = _occupied(call, grouping)[..., free:]
        found = torch.cat([found, pinned.expand(len(budgets), *pinned.shape)], -1)
    return [Route(grouping.query, grouping.kv, cells, grouping.pinned_groups) for cells in found]


def route_cells(
    call: Call, grouping: Grouping, density: float, probes: int, score: str, backend: Backend
) -> Route:
    """Scores the cells and spends what `density` leaves after the probes, the same for every head."""
    if density == 1.0:
        return keep_all(call, grouping)
    budget = pair_budget(call, density, probes)[:, None].expand(call.q.shape[:2])
    return keep_best(call, grouping, cell_scores(call, grouping, score, backend), budget, backend)


def _occupied(call: Call, grouping: Grouping) -> Tensor:
    kv_sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)
    return (grouping.query.sizes[..., :, None] > 0) & (kv_sizes[..., None, :] > 0)  # [B, H, Cq, Ck]

"""Which cells are computed: the mass each is expected to hold, and an exact budget of query-key pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from .execution.backend import Backend
from .types import Call, Grouping, Route

FILL_PASSES = 4


def cell_scores(call: Call, grouping: Grouping, score: str, backend: Backend) -> Tensor:
    """Log of the attention mass of every K/V group at the centroid of every query group.

    "mass" measures it exactly over the group's keys; "centroid" takes the group's centroid for all of them.
    -> [B, H, Cq, Ck] fp32, -inf for empty K/V groups, NaN for groups with NaN or Inf among their keys
    """
    # a query row that is not finite must not decide for its whole group
    anchors = torch.nan_to_num(grouping.query_centroids, nan=0.0, posinf=0.0, neginf=0.0)
    centroids = grouping.kv_centroids.repeat_interleave(call.shares, dim=1)  # [B, H, Ck, D]
    sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)[..., None, :]
    if score == "mass":
        mass = backend.cell_mass(anchors, call.k, grouping.kv, call.scale)
    else:
        mass = call.scale * anchors @ centroids.mT + sizes.log()
    # an infinite key may weigh nothing at a centroid and still decide a row
    broken = ~torch.isfinite(centroids).all(-1)[..., None, :] & (sizes > 0)
    return torch.where(broken, torch.nan, mass)


def spend(log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
    """Keeps the cells with the most mass per pair, over all cells of a head at once, within the budget.

    Every non-empty query group keeps its best cell even if the budget does not cover it. Equal scores go to
    the lower index. A score that is NaN comes first: what is wrong must reach the output.

    log_share [B, H, Cq, Ck] log of the share of a row's mass, query_sizes [B, H, Cq], kv_sizes [B, H, Ck],
    budget [B, H] int64 pairs -> cells [B, H, Cq, Ck] bool
    """
    pairs = query_sizes[..., :, None] * kv_sizes[..., None, :]  # [B, H, Cq, Ck] int64
    value = log_share - kv_sizes.clamp(min=1).log()[..., None, :]
    value = torch.where(value.isnan(), torch.inf, value)
    value = torch.where(pairs > 0, value, -torch.inf)

    best = value.argmax(-1, keepdim=True)
    kept = torch.zeros_like(pairs, dtype=torch.bool).scatter_(-1, best, pairs.gather(-1, best) > 0)

    order = value.flatten(-2).argsort(dim=-1, descending=True, stable=True)  # [B, H, Cq * Ck]
    cost = pairs.flatten(-2).gather(-1, order)
    taken = kept.flatten(-2).gather(-1, order)
    left = budget - (cost * taken).sum(-1)
    for _ in range(FILL_PASSES):
        # a cell that does not fit is passed over, so that one huge cell does not end the spending
        fits = ~taken & (cost > 0) & (cost <= left[..., None])
        fits &= torch.where(fits, cost, 0).cumsum(-1) <= left[..., None]
        taken |= fits
        left = left - (cost * fits).sum(-1)
    return torch.zeros_like(taken).scatter_(-1, order, taken).view_as(kept)


def pair_budget(call: Call, density: float, probes: int) -> Tensor:
    """Pairs that routed cells may use, after probes, exact rows and pinned keys are paid for.  # [B] int64"""
    keys, pinned = valid_keys(call), pinned_keys(call)  # [B]
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


def route_cells(
    call: Call, grouping: Grouping, density: float, probes: int, score: str, backend: Backend
) -> Route:
    """Spends the budget of every head on its cells; pinned keys are kept by every query group."""
    query_sizes = grouping.query.sizes  # [B, H, Cq]
    kv_sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)  # [B, H, Ck]
    every = (query_sizes[..., :, None] > 0) & (kv_sizes[..., None, :] > 0)  # [B, H, Cq, Ck]
    if density == 1.0:
        return Route(grouping.query, grouping.kv, every, grouping.pinned_groups)
    log_mass = cell_scores(call, grouping, score, backend)
    # pinned groups are paid for already; their mass stays in the normaliser because it is a row's own
    log_share = log_mass - torch.where(log_mass.isnan(), -torch.inf, log_mass).logsumexp(-1, keepdim=True)
    free = kv_sizes.shape[-1] - grouping.pinned_groups
    budget = pair_budget(call, density, probes)[:, None].expand(query_sizes.shape[:2])
    cells = spend(log_share[..., :free], query_sizes, kv_sizes[..., :free], budget)
    return Route(
        grouping.query, grouping.kv, torch.cat([cells, every[..., free:]], -1), grouping.pinned_groups
    )

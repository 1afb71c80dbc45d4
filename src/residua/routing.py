"""Which cells are computed: the mass each is expected to hold, and an exact budget of query-key pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from .execution.backend import Backend
from .types import Call, Grouping, Route


def cell_scores(call: Call, grouping: Grouping, score: str, backend: Backend) -> Tensor:
    """Log of the attention mass of every K/V group at the centroid of every query group.

    "mass" measures it exactly over the group's keys; "centroid" takes the group's centroid for all of them.
    -> [B, H, Cq, Ck] fp32, -inf for empty K/V groups, NaN for groups with NaN or Inf among their keys
    """
    sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)[..., None, :]
    if score == "mass":
        mass = backend.cell_mass(grouping.anchors, call.k, grouping.kv, call.scale)
    else:
        centroids = grouping.kv_centroids.repeat_interleave(call.shares, dim=1)  # [B, H, Ck, D]
        mass = call.scale * backend.matmul(grouping.anchors, centroids.mT) + sizes.log()
    # an infinite key may weigh nothing at a centroid and still decide a row
    largest = torch.linalg.vector_norm(grouping.kv_centroids, torch.inf, dim=-1)  # NaN stays NaN
    broken = ~torch.isfinite(largest).repeat_interleave(call.shares, dim=1)[..., None, :] & (sizes > 0)
    return torch.where(broken, torch.nan, mass)


def spend(
    log_share: Tensor,
    query_sizes: Tensor,
    kv_sizes: Tensor,
    budget: Tensor,
    backend: Backend | None = None,
) -> Tensor:
    """Keeps the cells with the most mass per pair, over all cells of a head at once, within the budget.

    Every non-empty query group keeps its best cell even if the budget does not cover it. Equal scores go to
    the lower index. A score that is NaN comes first: what is wrong must reach the output.

    log_share [B, H, Cq, Ck] log of the share of a row's mass, query_sizes [B, H, Cq], kv_sizes [B, H, Ck],
    budget [B, H] int64 pairs -> cells [B, H, Cq, Ck] bool
    """
    return (backend or Backend()).spend(log_share, query_sizes, kv_sizes, budget)


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
    # pinned groups are paid for already; their mass stays in the normaliser because it is a row's own
    broken = log_mass.isnan()
    log_share = torch.where(broken, -torch.inf, log_mass).log_softmax(-1)
    log_share = torch.where(broken, torch.nan, log_share)
    kv_sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)  # [B, H, Ck]
    free = kv_sizes.shape[-1] - grouping.pinned_groups
    cells = spend(log_share[..., :free], grouping.query.sizes, kv_sizes[..., :free], budget, backend)
    pinned = _occupied(call, grouping)[..., free:]
    return Route(grouping.query, grouping.kv, torch.cat([cells, pinned], -1), grouping.pinned_groups)


def route_cells(
    call: Call, grouping: Grouping, density: float, probes: int, score: str, backend: Backend
) -> Route:
    """Scores the cells and spends what `density` leaves after the probes."""
    if density == 1.0:
        return keep_all(call, grouping)
    budget = pair_budget(call, density, probes)[:, None].expand(call.q.shape[:2])
    return keep_best(call, grouping, cell_scores(call, grouping, score, backend), budget, backend)


def _occupied(call: Call, grouping: Grouping) -> Tensor:
    kv_sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)
    return (grouping.query.sizes[..., :, None] > 0) & (kv_sizes[..., None, :] > 0)  # [B, H, Cq, Ck]

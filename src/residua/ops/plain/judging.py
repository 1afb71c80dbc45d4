"""How far off rows would be that are known exactly, and what a head should therefore do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...types import MAX_BEND, Choice, Drift, SummaryKeys

Product = Callable[[Tensor, Tensor], Tensor]


def candidate_errors(
    rows: Tensor,
    group: Tensor,
    exact: Tensor,
    kept: tuple[Tensor, Tensor],
    skipped: tuple[Tensor, Tensor],
    drift: Drift | None,
    matmul: Product,
) -> Tensor:
    (sparse, lse), (value, top) = kept, skipped

    def joined(value: Tensor, top: Tensor) -> Tensor:
        # torch.sigmoid rounds differently from place to place
        share = (1 / (1 + (lse - top).exp()))[..., None]
        return torch.where(top[..., None] == -torch.inf, sparse, sparse + share * (value - sparse))

    candidates = [joined(value, top), sparse]
    if drift is not None:
        bend, shift = _drifted(rows, group, drift, matmul)
        candidates.insert(0, joined(value + shift, top + bend))
    missed = torch.stack(candidates) - exact  # [candidates, B, H, M, Dv]
    return missed.norm(dim=-1) / exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


def _drifted(rows: Tensor, group: Tensor, drift: Drift, matmul: Product) -> tuple[Tensor, Tensor]:
    """By how much the log-weights and the values of the summary keys grow.  # [B, H, M], [B, H, M, Dv]"""
    heads, groups = group.shape[1], drift.origin.shape[2]
    first = torch.arange(len(group) * heads, device=group.device).view(-1, heads, 1) * groups
    flat = group + first

    def own(x: Tensor) -> Tensor:  # [B, H, Cq, ...] -> [B, H, M, ...]
        return x.flatten(0, 2)[flat]

    basis = drift.basis.repeat_interleave(heads // drift.basis.shape[1], dim=1)
    y = matmul(rows, basis) - own(drift.origin)
    bend = (y * own(drift.curve) * y).sum(-1).clamp(max=MAX_BEND)
    return bend, (y[..., None] * own(drift.slope)).sum(-2)


def best_candidate(errors: Tensor, weights: Tensor, bare: Tensor, handicap: float) -> tuple[Tensor, Tensor]:
    tiny = torch.finfo(torch.float32).tiny
    means = (errors * weights).sum(-1) / weights.sum(-1).clamp(min=tiny)  # [candidates, B, H]
    best, error = torch.zeros_like(bare, dtype=torch.long), means[0]
    for number, simpler in enumerate(means[1:], 1):
        better = simpler < handicap * error
        best, error = torch.where(better, number, best), torch.where(better, simpler, error)
    last = len(means) - 1
    return torch.where(bare, last, best), torch.where(bare, means[last], error)


def switch_summary(summary: SummaryKeys, choice: Tensor) -> SummaryKeys:
    weight = torch.where((choice <= Choice.WITHOUT_DRIFT)[..., None, None], summary.log_weight, -torch.inf)
    drift = summary.drift
    if drift is not None:
        still = (choice != Choice.WITH_DRIFT)[..., None, None]
        curve = torch.where(still, 0.0, drift.curve)
        slope = torch.where(still[..., None], 0.0, drift.slope)
        drift = Drift(drift.basis, drift.origin, curve, slope)
    return SummaryKeys(summary.keys, summary.values, weight, drift)

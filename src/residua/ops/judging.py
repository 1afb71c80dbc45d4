"""How far off rows would be that are known exactly, and what a head should therefore do."""

import torch
from torch import Tensor

from ..types import MAX_BEND, Choice, Drift, SummaryKeys
from .matrices import MatrixPrimitives


class JudgingPrimitives(MatrixPrimitives):
    """How far off rows would be that are known exactly, and what a head should therefore do."""

    def candidate_errors(
        self,
        rows: Tensor,
        group: Tensor,
        exact: Tensor,
        kept: tuple[Tensor, Tensor],
        skipped: tuple[Tensor, Tensor],
        drift: Drift | None,
    ) -> Tensor:
        """Relative error of rows that are known exactly, if they attended to their kept keys and to summary keys that
        drift (left out where `drift` is None), to both without the drift, or to the kept keys alone.

        Args:
            rows: [B, H, M, D].
            group: [B, H, M] int64, the query group of every row.
            exact: [B, H, M, Dv] fp32.
            kept: Output [B, H, M, Dv] and log-sum-exp [B, H, M] over the kept keys, fp32.
            skipped: The same over the summary keys.
            drift: Of the summary keys; None: they have none.

        Returns:
            [candidates, B, H, M] fp32.
        """
        (sparse, lse), (value, top) = kept, skipped

        def joined(value: Tensor, top: Tensor) -> Tensor:
            # torch.sigmoid rounds differently from place to place
            share = (1 / (1 + (lse - top).exp()))[..., None]
            return torch.where(top[..., None] == -torch.inf, sparse, sparse + share * (value - sparse))

        candidates = [joined(value, top), sparse]
        if drift is not None:
            bend, shift = self._drifted(rows, group, drift)
            candidates.insert(0, joined(value + shift, top + bend))
        missed = torch.stack(candidates) - exact  # [candidates, B, H, M, Dv]
        return missed.norm(dim=-1) / exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)

    def best_candidate(
        self, errors: Tensor, weights: Tensor, without: Tensor, handicap: float
    ) -> tuple[Tensor, Tensor]:
        """The candidate of every head with the smallest mean error.

        Args:
            errors: [candidates, B, H, M] fp32.
            weights: [B, H, M] fp32, of the rows.
            without: [B, H] bool, heads without a summary: they take the last candidate.
            handicap: A later candidate must have less than this times the error of the best before it.

        Returns:
            The number of the candidate [B, H] int64, and its error [B, H] fp32.
        """
        total = weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        means = (errors * weights).sum(-1) / total  # [candidates, B, H]
        best, error = torch.zeros_like(without, dtype=torch.long), means[0]
        for number, simpler in enumerate(means[1:], 1):
            better = simpler < handicap * error
            best, error = torch.where(better, number, best), torch.where(better, simpler, error)
        last = len(means) - 1
        return torch.where(without, last, best), torch.where(without, means[last], error)

    def switch_summary(self, summary: SummaryKeys, choice: Tensor) -> SummaryKeys:
        """The summary as the heads chose it: without its drift, or without any key.

        Args:
            summary: May be changed in place.
            choice: [B, H] int64, numbers of `Choice`.

        Returns:
            The summary.
        """
        weight = torch.where((choice <= Choice.WITHOUT_DRIFT)[..., None, None], summary.log_weight, -torch.inf)
        drift = summary.drift
        if drift is not None:
            still = (choice != Choice.WITH_DRIFT)[..., None, None]
            curve = torch.where(still, 0.0, drift.curve)
            slope = torch.where(still[..., None], 0.0, drift.slope)
            drift = Drift(drift.basis, drift.origin, curve, slope)
        return SummaryKeys(summary.keys, summary.values, weight, drift)

    def _drifted(self, rows: Tensor, group: Tensor, drift: Drift) -> tuple[Tensor, Tensor]:
        """By how much the log-weights and the values of the summary keys grow.  # [B, H, M], [B, H, M, Dv]"""
        heads, groups = group.shape[1], drift.origin.shape[2]
        flat = group + torch.arange(len(group) * heads, device=group.device).view(-1, heads, 1) * groups

        def own(x: Tensor) -> Tensor:  # [B, H, Cq, ...] -> [B, H, M, ...]
            return x.flatten(0, 2)[flat]

        basis = drift.basis.repeat_interleave(heads // drift.basis.shape[1], dim=1)
        y = self.matmul(rows, basis) - own(drift.origin)
        bend = (y * own(drift.curve) * y).sum(-1).clamp(max=MAX_BEND)
        return bend, (y[..., None] * own(drift.slope)).sum(-2)

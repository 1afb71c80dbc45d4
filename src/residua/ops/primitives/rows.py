"""Rows that are computed exactly, and what a call learns from them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import Drift, Partition, ResidualFit, SummaryKeys
from .. import plain
from .numbers import NumberPrimitives


class RowPrimitives(NumberPrimitives):
    """Rows that are computed exactly, and what a call learns from them."""

    def attend_rows(self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
        """Exact attention of some query rows over all keys that are not padding.

        Args:
            rows: [B, H, M, D].
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            key_mask: [B, Nk] bool, False at padding; None: no padding.
            scale: Factor of the scores.

        Returns:
            [B, H, M, Dv] fp32.
        """
        return plain.attend_rows(rows, k, v, key_mask, scale)

    def split_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`attend_rows`, and beside it what the rows would see if they kept only some K/V groups.

        Args:
            rows: As in `attend_rows`.
            k: As in `attend_rows`.
            v: As in `attend_rows`.
            kv: Groups of the keys.
            kept: [B, H, M, Ck] bool, the groups that each row keeps.
            key_mask: As in `attend_rows`.
            scale: As in `attend_rows`.

        Returns:
            The exact output [B, H, M, Dv], that over the kept keys alone [B, H, M, Dv], and the natural
            log-sum-exp of the latter [B, H, M], all fp32; 0 and -inf for a row that keeps nothing.
        """
        return plain.split_rows(rows, k, v, kv, kept, key_mask, scale)

    def central_rows(self, x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
        """Visits the groups in turn and takes from each the row nearest to the group's mean that is not taken
        yet (ties: the lower index; NaN last). Rows of no group fill up what is left.

        Args:
            x: [B, H, N, R] fp32.
            labels: [B, H, N], the group of every row, or -1.
            groups: How many groups there are.
            count: How many rows to take, at most N.

        Returns:
            [B, H, count] int64.
        """
        return plain.central_rows(x, labels, groups, count)

    def candidate_errors(
        self,
        rows: Tensor,
        group: Tensor,
        exact: Tensor,
        kept: tuple[Tensor, Tensor],
        skipped: tuple[Tensor, Tensor],
        drift: Drift | None,
    ) -> Tensor:
        """Relative error of rows that are known exactly, if they attended to their kept keys and to summary
        keys that drift (left out where `drift` is None), to both without the drift, or to the kept keys
        alone.

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
        return plain.candidate_errors(rows, group, exact, kept, skipped, drift, self.matmul)

    def best_candidate(self, errors: Tensor, weights: Tensor, bare: Tensor, handicap: float) -> tuple[Tensor, Tensor]:
        """The candidate of every head with the least mean error.

        Args:
            errors: [candidates, B, H, M] fp32.
            weights: [B, H, M] fp32, of the rows.
            bare: [B, H] bool, heads that take the last candidate.
            handicap: A later candidate must have less than this times the error of the best before it.

        Returns:
            The number of the candidate [B, H] int64, and its error [B, H] fp32.
        """
        return plain.best_candidate(errors, weights, bare, handicap)

    def switch_summary(self, summary: SummaryKeys, choice: Tensor) -> SummaryKeys:
        """The summary as the heads chose it: without its drift, or without any key.

        Args:
            summary: May be changed in place.
            choice: [B, H] int64, numbers of `Choice`.

        Returns:
            The summary.
        """
        return plain.switch_summary(summary, choice)

    def fit_residual(
        self, x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
    ) -> ResidualFit:
        """The paper's fit: a weighted ridge regression from probe outputs to their residuals (section 4.2,
        appendix A).

        A probe whose own output is not finite is left out: its row is lost anyway. A probe whose residual
        alone is not finite has met NaN or Inf among the skipped keys, and passes it on to every row, as dense
        attention would.

        Args:
            x: [..., M, Dv], sparse outputs at the probes.
            residual: [..., M, Dv], what they miss.
            weights: [..., M], how many rows each probe stands for.
            rank: Leading directions of the residuals to which the fit is restricted.
            ridge: Strength of the penalty.
            subspace: Whether the fit is restricted at all.

        Returns:
            The map, and its error at each probe.
        """
        return plain.fit_residual(x, residual, weights, rank, ridge, subspace)

    def add_affine(self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        """`out + out @ left @ right + bias` in one pass.

        Args:
            out: [B, H, N, Dv] fp32; its memory may be used again.
            left: [B, H, Dv, R].
            right: [B, H, R, Dv].
            bias: [B, H, Dv].
            dtype: Of the result.

        Returns:
            [B, H, N, Dv] in `dtype`.
        """
        return plain.add_affine(out, left, right, bias, dtype)

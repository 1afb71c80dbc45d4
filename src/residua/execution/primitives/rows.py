"""Rows that are computed exactly, and what a call learns from them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import Drift, Partition, ResidualFit, SummaryKeys
from .. import plain
from .numbers import NumberPrimitives


class RowPrimitives(NumberPrimitives):
    """Rows that are computed exactly, and what a call learns from them."""

    def attend_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float
    ) -> Tensor:
        """Exact attention of some query rows over all keys that are not padding.

        rows [B, H, M, D], key_mask [B, Nk] bool -> [B, H, M, Dv] fp32
        """
        return plain.attend_rows(rows, k, v, key_mask, scale)

    def split_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`attend_rows`, and beside it what the rows would see if they kept only some K/V groups.

        rows [B, H, M, D], kept [B, H, M, Ck] bool -> exact [B, H, M, Dv], over the kept keys alone
        [B, H, M, Dv], their natural log-sum-exp [B, H, M], all fp32; 0 and -inf for a row that keeps nothing
        """
        return plain.split_rows(rows, k, v, kv, kept, key_mask, scale)

    def central_rows(self, x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
        """Visits the groups in turn and takes from each the row nearest to the group's mean that is not taken
        yet (ties: the lower index; NaN last). Rows of no group fill up what is left.

        x [B, H, N, R] fp32, labels [B, H, N], count <= N -> rows [B, H, count] int64
        """
        return plain.central_rows(x, labels, groups, count)

    def candidate_errors(
        self, rows: Tensor, group: Tensor, exact: Tensor, kept: tuple[Tensor, Tensor],
        skipped: tuple[Tensor, Tensor], drift: Drift | None,
    ) -> Tensor:  # fmt: skip
        """Relative error of rows that are known exactly, if they attended to their kept keys and to summary
        keys that drift (left out where `drift` is None), to both without the drift, or to the kept keys
        alone.

        rows [B, H, M, D] of the groups [B, H, M] int64, exact [B, H, M, Dv] fp32; kept and skipped: output
        [B, H, M, Dv] and log-sum-exp [B, H, M] over the kept keys and over the summary keys, fp32
        -> [candidates, B, H, M] fp32
        """
        return plain.candidate_errors(rows, group, exact, kept, skipped, drift, self.matmul)

    def best_candidate(
        self, errors: Tensor, weights: Tensor, bare: Tensor, handicap: float
    ) -> tuple[Tensor, Tensor]:
        """The candidate of every head with the least mean error by `weights`; a later one must have less than
        `handicap` times the error of the best before it. Heads that are `bare` take the last.

        errors [candidates, B, H, M] fp32, weights [B, H, M] fp32, bare [B, H] bool -> number [B, H] int64,
        error [B, H] fp32
        """
        return plain.best_candidate(errors, weights, bare, handicap)

    def switch_summary(self, summary: SummaryKeys, choice: Tensor) -> SummaryKeys:
        """The summary as the heads chose it: without its drift, or without any key; maybe in place.

        choice [B, H] int64, numbers of `Choice`
        """
        return plain.switch_summary(summary, choice)

    def fit_residual(
        self, x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
    ) -> ResidualFit:
        """The paper's fit: a weighted ridge regression from probe outputs to their residuals, restricted to
        the leading `rank` directions of the residuals if `subspace` (section 4.2, appendix A).

        A probe whose own output is not finite is left out: its row is lost anyway. A probe whose residual
        alone is not finite has met NaN or Inf among the skipped keys, and passes it on to every row, as dense
        attention would.

        x [..., M, Dv], residual [..., M, Dv], weights [..., M]
        """
        return plain.fit_residual(x, residual, weights, rank, ridge, subspace)

    def add_affine(
        self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """`out + out @ left @ right + bias` in one pass, cast to `dtype`; may reuse the memory of `out`.

        out [B, H, N, Dv] fp32, left [B, H, Dv, R], right [B, H, R, Dv], bias [B, H, Dv]
        """
        return plain.add_affine(out, left, right, bias, dtype)

"""Probe-fitted residual reconstruction: a weighted affine map from the sparse output to what it misses,
restricted to the output directions that the probe residuals show (the paper's section 4.2, appendix A)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..execution.backend import Backend
from ..types import Probes


@dataclass(frozen=True)
class Fit:
    """R^(x) = bias + x @ left @ right, the standardisation folded in."""

    left: Tensor  # [..., Dv, R] fp32
    right: Tensor  # [..., R, Dv] fp32
    bias: Tensor  # [..., Dv] fp32
    left_out: Tensor  # [..., M, Dv] fp32, error of each probe under the fit without it

    def predict(self, x: Tensor) -> Tensor:
        """The residual expected at sparse outputs x [..., N, Dv]."""
        return x.float() @ self.left @ self.right + self.bias[..., None, :]


def fit(
    x: Tensor,
    residual: Tensor,
    weights: Tensor,
    rank: int,
    ridge: float,
    subspace: bool = True,
    backend: Backend | None = None,
) -> Fit:
    """Fits the map from probe outputs x [..., M, Dv] to residuals [..., M, Dv] with weights [..., M].

    A probe whose own sparse output is not finite is left out, as its row is lost anyway. A probe whose
    residual alone is not finite has seen NaN or Inf among the skipped keys; it is passed on to every row, as
    dense attention would.
    """
    backend = backend or Backend()
    return Fit(*backend.fit_repair(x, residual, weights, rank, ridge, subspace))


def apply(out: Tensor, found: Fit, probes: Probes, dtype: torch.dtype, backend: Backend) -> Tensor:
    """Corrects the sparse output [B, H, Nq, Dv] fp32 in one pass and puts the exact probe rows in place."""
    out = backend.add_affine(out, found.left, found.right, found.bias, working_dtype(dtype))
    return probes.put(narrow(out, dtype))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp16 is narrow: a correction could leave it where dense attention, a mean of the values, cannot."""
    return torch.float32 if dtype == torch.float16 else dtype


def narrow(out: Tensor, dtype: torch.dtype) -> Tensor:
    """A corrected output in its final dtype; finite values stay finite, Inf stays Inf."""
    if dtype != torch.float16:
        return out.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(out.isinf(), out, out.clamp(-limit, limit)).to(dtype)


def estimate_error(found: Fit, probes: Probes) -> Tensor:
    """Estimated mean relative row error: every probe judged by the fit without it, weighted by coverage.

    -> [B, H]. Stratified probes lie near the middle of their groups, so the estimate reads low for them.
    """
    norm = probes.exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = found.left_out.norm(dim=-1) / norm  # [B, H, M]
    total = probes.weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (error * probes.weights).sum(-1) / total

"""Probe-fitted residual reconstruction: a weighted affine map from the sparse output to what it misses,
restricted to the output directions that the probe residuals show (the paper's section 4.2, appendix A)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .execution.backend import Backend
from .subspace import leading_basis
from .types import Probes

FEATURE_EPS = 1e-6  # inside the root of the feature scale
LEVERAGE_MOST = (
    0.9  # above it a probe decides its own fit and says little (docs/decisions/0003-error-estimate.md)
)


@dataclass(frozen=True)
class Repair:
    """R^(x) = bias + x @ left @ right, the standardisation folded in."""

    left: Tensor  # [..., Dv, R] fp32
    right: Tensor  # [..., R, Dv] fp32
    bias: Tensor  # [..., Dv] fp32
    left_out: Tensor  # [..., M, Dv] fp32, error of each probe under the fit without it

    def predict(self, x: Tensor) -> Tensor:
        """The residual expected at sparse outputs x [..., N, Dv]."""
        return x.float() @ self.left @ self.right + self.bias[..., None, :]


def fit(
    x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool = True
) -> Repair:
    """Fits the map from probe outputs x [..., M, Dv] to residuals [..., M, Dv] with weights [..., M].

    A probe whose own sparse output is not finite is left out, as its row is lost anyway. A probe whose
    residual alone is not finite has seen NaN or Inf among the skipped keys; it is passed on to every row, as
    dense attention would.
    """
    finite = torch.isfinite(x).all(-1)  # [..., M]
    weights = torch.where(finite, weights.double(), 0.0)
    x, residual = (torch.where(finite[..., None], t.double(), 0.0) for t in (x, residual))
    poison = torch.where(torch.isfinite(residual), 0.0, torch.nan).sum(-2)  # [..., Dv]
    residual = torch.nan_to_num(residual, nan=0.0, posinf=0.0, neginf=0.0)

    total = weights.sum(-1, keepdim=True)
    alpha = (weights / total.clamp(min=torch.finfo(torch.float64).tiny))[..., None]  # [..., M, 1]
    mean_x, mean_r = ((alpha * t).sum(-2, keepdim=True) for t in (x, residual))
    scale = ((alpha * (x - mean_x).square()).sum(-2, keepdim=True) + FEATURE_EPS).sqrt()
    root = (alpha * x.shape[-2]).sqrt()  # W^(1/2), weights of unit mean
    features = root * (x - mean_x) / scale  # [..., M, Dv]
    targets = root * (residual - mean_r)

    right = _leading_directions(targets, rank).mT if subspace else torch.eye(x.shape[-1]).to(targets)
    left, leverage = _ridge(features, targets @ right.mT, ridge)  # [..., Dv, R], [..., M]

    error = residual - mean_r - (x - mean_x) / scale @ left @ right
    kept = (1 - leverage - alpha[..., 0]).clamp(min=1 - LEVERAGE_MOST)
    left = left / scale.mT
    bias = (mean_r - mean_x @ left @ right)[..., 0, :] + poison
    return Repair(
        *(t.float() for t in (left, right.expand(*left.shape[:-2], -1, -1), bias, error / kept[..., None]))
    )


def _ridge(features: Tensor, targets: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """argmin |targets - features B|^2 + ridge |B|^2 in the smaller of its two forms, and each row's leverage.

    features [..., M, Dv], targets [..., M, R] -> B [..., Dv, R], leverage [..., M]
    """
    rows, dim = features.shape[-2:]
    gram = features.mT @ features if dim <= rows else features @ features.mT  # [..., n, n]
    # without a ridge the equations may be singular; a speck of one leaves the solution as it is
    speck = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None].clamp(min=1e-30)
    gram.diagonal(dim1=-2, dim2=-1).add_(speck.clamp(min=ridge))
    root, _ = torch.linalg.cholesky_ex(gram)
    if dim <= rows:
        solved = torch.cholesky_solve(features.mT, root)  # [..., Dv, M]
        return solved @ targets, (features * solved.mT).sum(-1)
    both = torch.cholesky_solve(torch.cat([targets, features @ features.mT], -1), root)  # [..., M, R + M]
    return features.mT @ both[..., : targets.shape[-1]], both[..., targets.shape[-1] :].diagonal(
        dim1=-2, dim2=-1
    )


def _leading_directions(residual: Tensor, rank: int) -> Tensor:
    """Leading right singular vectors of residual [..., M, Dv], from its smaller Gram matrix; directions
    that carry nothing are zero.  # [..., Dv, min(rank, M)]"""
    rows, dim = residual.shape[-2:]
    rank = min(rank, rows, dim)
    if (
        residual.device.type != "cpu"
    ):  # an eigensolver would make the GPU wait; any basis of the space will do
        return leading_basis(residual.mT @ residual, rank)
    gram = residual.mT @ residual if dim <= rows else residual @ residual.mT
    size = gram.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(gram.dtype).tiny)
    energy, vectors = torch.linalg.eigh(gram / size)  # ascending
    energy, vectors = energy.flip(-1)[..., :rank], vectors.flip(-1)[..., :rank]
    carries = (energy > 1e-12)[..., None, :]
    if dim > rows:
        vectors = (
            residual.mT
            @ vectors
            / (energy[..., None, :] * size).clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
        )
    return torch.where(carries, vectors, 0.0)


def apply(out: Tensor, repair: Repair, probes: Probes, dtype: torch.dtype, backend: Backend) -> Tensor:
    """Corrects the sparse output [B, H, Nq, Dv] fp32 in one pass and puts the exact probe rows in place."""
    # fp16 is narrow: a correction could leave it where dense attention, a mean of the values, cannot
    narrow = dtype == torch.float16
    out = backend.add_affine(out, repair.left, repair.right, repair.bias, torch.float32 if narrow else dtype)
    if narrow:
        limit = torch.finfo(dtype).max
        out = torch.where(out.isinf(), out, out.clamp(-limit, limit)).to(dtype)  # Inf stays Inf
    index = probes.rows[..., None].expand(*probes.rows.shape, out.shape[-1])
    return out.scatter_(2, index, probes.exact.to(dtype))


def estimate_error(repair: Repair, probes: Probes) -> Tensor:
    """Estimated mean relative row error: every probe judged by the fit without it, weighted by coverage.

    -> [B, H]. Stratified probes lie near the middle of their groups, so the estimate reads low for them.
    """
    norm = probes.exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = repair.left_out.norm(dim=-1) / norm  # [B, H, M]
    total = probes.weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (error * probes.weights).sum(-1) / total

"""The paper's residual fit: a weighted ridge regression from sparse outputs to what they miss, restricted to the
output directions that the probe residuals show (section 4.2, appendix A)."""

import torch
from torch import Tensor

from ..types import ResidualFit
from .constants import FEATURE_EPS, MAX_LEVERAGE, MIN_ENERGY
from .matrices import MatrixPrimitives, chunk_rows, on_cpu
from .subspace import leading_basis


class ResidualPrimitives(MatrixPrimitives):
    """The paper's residual fit, and its use."""

    def fit_residual(
        self, x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
    ) -> ResidualFit:
        """Fits what sparse outputs miss.

        A probe whose own output is not finite is left out: its row is lost anyway. A probe whose residual alone is not
        finite has met NaN or Inf among the skipped keys, and passes it on to every row, as dense attention would.

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
        finite = torch.isfinite(x).all(-1)  # [..., M]
        weights = torch.where(finite, weights.double(), 0.0)
        x, residual = (torch.where(finite[..., None], t.double(), 0.0) for t in (x, residual))
        poison = (0.0 * residual).sum(-2)  # [..., Dv], NaN where a residual is not finite
        residual = torch.nan_to_num(residual, nan=0.0, posinf=0.0, neginf=0.0)

        total = weights.sum(-1, keepdim=True)
        alpha = (weights / total.clamp(min=torch.finfo(torch.float64).tiny))[..., None]  # [..., M, 1]
        mean_x, mean_r = ((alpha * t).sum(-2, keepdim=True) for t in (x, residual))
        scale = ((alpha * (x - mean_x).square()).sum(-2, keepdim=True) + FEATURE_EPS).sqrt()
        root = (alpha * x.shape[-2]).sqrt()  # W^(1/2), weights of unit mean
        features = root * (x - mean_x) / scale  # [..., M, Dv]
        targets = root * (residual - mean_r)

        if subspace:
            right = self._leading_directions(targets, rank).mT
        else:
            right = torch.eye(x.shape[-1], dtype=targets.dtype).to(targets)
        left, leverage = _ridge(features, targets @ right.mT, ridge)  # [..., Dv, R], [..., M]

        error = residual - mean_r - (x - mean_x) / scale @ left @ right
        kept = (1 - leverage - alpha[..., 0]).clamp(min=1 - MAX_LEVERAGE)
        left = left / scale.mT
        bias = (mean_r - mean_x @ left @ right)[..., 0, :] + poison
        right = right.expand(*left.shape[:-2], -1, -1)
        return ResidualFit(left.float(), right.float(), bias.float(), (error / kept[..., None]).float())

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
        result = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
        step = chunk_rows(12 * out.shape[-1] * out.shape[0] * out.shape[1], out.shape[2])
        for start in range(0, out.shape[2], step):
            part = out[:, :, start : start + step]
            result[:, :, start : start + step] = part + (part @ left @ right + bias[..., None, :])
        return result

    def _leading_directions(self, residual: Tensor, rank: int) -> Tensor:
        """Leading right singular vectors of residual [..., M, Dv], from its smaller Gram matrix; directions
        that carry nothing are zero.  # [..., Dv, min(rank, M)]"""
        rows, dim = residual.shape[-2:]
        rank = min(rank, rows, dim)
        if not on_cpu(residual):
            # an eigensolver would make the GPU wait; any basis of the space will do
            return leading_basis(residual.mT @ residual, rank)
        gram = residual.mT @ residual if dim <= rows else residual @ residual.mT
        energy, vectors = self._eigh(gram)  # ascending
        energy, vectors = energy.flip(-1)[..., None, :rank], vectors.flip(-1)[..., :rank]
        tiny = torch.finfo(gram.dtype).tiny
        largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None].clamp(min=tiny)
        if dim > rows:
            vectors = residual.mT @ vectors / energy.clamp(min=tiny).sqrt()
        return torch.where(energy > MIN_ENERGY * largest, vectors, 0.0)


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
    return features.mT @ both[..., : targets.shape[-1]], both[..., targets.shape[-1] :].diagonal(dim1=-2, dim2=-1)

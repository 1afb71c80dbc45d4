"""The directions in which both queries and keys vary most."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..subspace import leading_basis

VARIANCE_FLOOR = 1e-4  # of the mean variance of the keys, so that their covariance can be inverted


def shared_directions(
    spread: Tensor,
    covariance: Tensor,
    rank: int,
    scale: float,
    leading_space: Callable[[Tensor, int], Tensor] = leading_basis,
) -> tuple[Tensor, Tensor]:
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    floor = (VARIANCE_FLOOR * mean).clamp(min=torch.finfo(torch.float32).tiny)
    root = torch.linalg.cholesky_ex(covariance + floor * eye).L
    leading = leading_space(root.mT @ spread @ root, rank)
    to_key = torch.linalg.solve_triangular(root.mT, leading, upper=True)
    return (scale * (root @ leading)).float(), to_key.float()

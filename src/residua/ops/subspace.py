"""Leading eigenspaces of small symmetric matrices without an eigensolver, for calls that must not wait.

On a GPU `torch.linalg.eigh` waits for the device to look at its error codes, and takes large batches one
matrix after the other. Grouping and reconstruction need no eigenvectors, only the space that the leading ones
span: distances and projections are the same in every orthonormal basis of it. Orthogonal iteration finds that
space with products and Cholesky factors alone.
"""

import math

import torch
from torch import Tensor

from .constants import SUBSPACE_SHIFT, SUBSPACE_STEPS


def leading_basis(matrix: Tensor, rank: int, steps: int = SUBSPACE_STEPS) -> Tensor:
    """Orthonormal columns that approximately span the `rank` leading eigenvectors of matrix [..., n, n] fp64.

    Directions whose eigenvalues nearly equal the last one may be mixed up with each other. The start
    is fixed, so repeats are bit-identical.  # [..., n, rank]
    """
    size = matrix.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    matrix = matrix / size
    shifted = matrix + SUBSPACE_SHIFT * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    basis = _cosines(matrix, rank)
    for _ in range(steps):
        basis = _orthonormal(shifted @ basis)
    return _orthonormal(basis)  # a second time, because the first pass through Cholesky factors loses digits


def leading_factor(metric: Tensor, rank: int) -> Tensor:
    """F with F F^T = the part of the metric in its leading space, in units of the mean eigenvalue there.

    Replaces eigenvectors times the roots of their eigenvalues: F differs from that by a rotation of its
    columns, which changes no distance and no RMS.  # [..., D, D] fp64 -> [..., D, rank] fp32
    """
    basis = leading_basis(metric.double(), rank)
    inner = basis.mT @ metric.double() @ basis  # [..., rank, rank]
    mean = inner.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    inner = inner / mean.clamp(min=torch.finfo(inner.dtype).tiny)
    return (basis @ _cholesky(inner)).float()


def _cosines(like: Tensor, rank: int) -> Tensor:
    """The first columns of the cosine transform: orthonormal, dense, the same on every device."""
    size = like.shape[-1]
    row = torch.arange(size, dtype=like.dtype, device=like.device)[:, None] + 0.5
    column = torch.arange(rank, dtype=like.dtype, device=like.device)
    basis = torch.cos(row * column * (math.pi / size)) * math.sqrt(2 / size)
    return basis.expand(*like.shape[:-2], size, rank)


def _orthonormal(x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(_cholesky(x.mT @ x), x.mT, upper=False).mT


def _cholesky(gram: Tensor) -> Tensor:
    """Lower factor; a small term on the diagonal makes up for rounding."""
    speck = 1e-15 * gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.cholesky_ex(gram + (speck + torch.finfo(gram.dtype).tiny) * eye).L

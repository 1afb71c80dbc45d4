"""Small matrices, and numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ...subspace import leading_basis, leading_factor
from .. import plain


class NumberPrimitives:
    """Small matrices, and numbers that are not finite."""

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y in fp32 for small matrices. In a backend that is deterministic across batches a product does
        not depend on the others beside it, which `torch.matmul` does not promise.

        x [..., M, K], y [..., K, N] with the same leading dimensions -> [..., M, N] fp32
        """
        return x.float() @ y.float()

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of symmetric matrices.

        matrix [..., n, n] fp64 -> values [..., n], vectors [..., n, n] in columns
        """
        return plain.eigh(matrix)

    def leading_basis(self, matrix: Tensor, rank: int) -> Tensor:
        """Orthonormal columns that span about the `rank` leading eigenvectors of matrix [..., n, n]."""
        return leading_basis(matrix.double(), rank)

    def leading_factor(self, moment: Tensor, rank: int) -> Tensor:
        """F with F F^T = the second moment in its leading space, over its mean eigenvalue there. Any rotation
        of F's columns will do.

        moment [..., D, D] -> [..., D, rank] fp32
        """
        return leading_factor(moment, rank)

    def second_moment(self, x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
        """Mean of x^T x over the rows that are counted and finite, around their mean if `centred`.

        x [B, H, M, D], counted [B, H, M] bool or None -> [B, H, D, D] fp64, zeros where no row counts
        """
        return plain.second_moment(x, counted, centred)

    def only_finite(self, x: Tensor) -> Tensor:
        """x in fp32, with zeros for NaN and Inf; maybe x itself."""
        return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)

    def row_peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest finite magnitude of every row, and whether the whole row is finite.

        x [B, H, N, D] -> peaks [B, H, N] fp32 (fp64 for fp64 rows), finite [B, H, N] bool
        """
        return plain.row_peaks(x)

    def lost_channels(self, v: Tensor, mask: Tensor | None) -> Tensor:
        """Which channels of v [B, H, N, D] hold NaN or Inf where mask [B, N] is not False: asked at the end
        of a call, so that a backend may have looked on the way.  # [B, H, D] bool"""
        bad = ~torch.isfinite(v)
        if mask is not None:
            bad &= mask[:, None, :, None]
        return bad.any(2)

    def spoil(self, out: Tensor, lost: Tensor) -> Tensor:
        """NaN for what is finite in the channels that are `lost`, maybe in place.

        out [B, H, N, Dv], lost [B, H, 1, Dv] bool -> as out
        """
        if out.device.type == "cpu" and not lost.any():  # a GPU must not wait for the answer
            return out
        return torch.where(lost & out.isfinite(), torch.nan, out)

"""Small matrices, and numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import plain
from ..subspace import leading_basis, leading_factor


class NumberPrimitives:
    """Small matrices, and numbers that are not finite."""

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y in fp32 for small matrices. In a backend that is deterministic across batches a product does
        not depend on the others beside it, which `torch.matmul` does not promise.

        Args:
            x: [..., M, K].
            y: [..., K, N], with the same leading dimensions.

        Returns:
            [..., M, N] fp32.
        """
        return x.float() @ y.float()

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of symmetric matrices.

        Args:
            matrix: [..., n, n] fp64.

        Returns:
            Values [..., n], ascending, and vectors [..., n, n] in columns.
        """
        return plain.eigh(matrix)

    def leading_basis(self, matrix: Tensor, rank: int) -> Tensor:
        """Orthonormal columns that span about the leading eigenvectors.

        Args:
            matrix: [..., n, n], symmetric.
            rank: How many.

        Returns:
            [..., n, rank].
        """
        return leading_basis(matrix.double(), rank)

    def leading_factor(self, moment: Tensor, rank: int) -> Tensor:
        """F with F F^T = the second moment in its leading space, over its mean eigenvalue there. Any rotation
        of F's columns will do.

        Args:
            moment: [..., D, D], symmetric.
            rank: Dimensions of the leading space.

        Returns:
            [..., D, rank] fp32.
        """
        return leading_factor(moment, rank)

    def second_moment(self, x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
        """Mean of x^T x over the rows that are counted and finite.

        Args:
            x: [B, H, M, D].
            counted: [B, H, M] bool; None: all rows.
            centred: Whether it is taken around the mean of these rows.

        Returns:
            [B, H, D, D] fp64, zeros where no row counts.
        """
        return plain.second_moment(x, counted, centred)

    def only_finite(self, x: Tensor) -> Tensor:
        """Zeros for NaN and Inf.

        Args:
            x: Any tensor.

        Returns:
            x in fp32; maybe x itself.
        """
        return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)

    def row_peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest finite magnitude of every row, and whether the whole row is finite.

        Args:
            x: [B, H, N, D].

        Returns:
            Peaks [B, H, N] fp32 (fp64 for fp64 rows), and finite [B, H, N] bool.
        """
        return plain.row_peaks(x)

    def lost_channels(self, v: Tensor, mask: Tensor | None) -> Tensor:
        """Which channels of the values hold NaN or Inf. Asked at the end of a call, so that a backend may
        have looked on the way.

        Args:
            v: [B, H, N, D].
            mask: [B, N] bool, False at rows that do not count; None: all count.

        Returns:
            [B, H, D] bool.
        """
        bad = ~torch.isfinite(v)
        if mask is not None:
            bad &= mask[:, None, :, None]
        return bad.any(2)

    def spoil(self, out: Tensor, lost: Tensor) -> Tensor:
        """NaN for what is finite in the channels that are lost.

        Args:
            out: [B, H, N, Dv]; may be changed in place.
            lost: [B, H, 1, Dv] bool.

        Returns:
            As out.
        """
        if out.device.type == "cpu" and not lost.any():  # a GPU must not wait for the answer
            return out
        return torch.where(lost & out.isfinite(), torch.nan, out)

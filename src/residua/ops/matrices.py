"""Small matrices, and numbers that are not finite."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import subspace

CHUNK_BYTES = 64 << 20


def on_cpu(x: Tensor) -> bool:
    """Whether results can be looked at without waiting, and sums have a fixed order, as they do not on a GPU."""
    return x.device.type == "cpu"


@contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """A call needs no gradients, and computes in the precision of its tensors whatever autocast says."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def wait_for(device: torch.device) -> None:
    """Returns when a GPU has done what it was asked to do; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def chunk_rows(row_bytes: int, total: int) -> int:
    """How many of `total` rows of that many bytes are worked on at a time; at least one.

    Work is cut into chunks so that a temporary never exceeds about `CHUNK_BYTES`, whatever N is.
    """
    return max(1, min(total, CHUNK_BYTES // max(1, row_bytes)))


class MatrixPrimitives:
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

    def second_moment(self, x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
        """Mean of x^T x over the rows that are counted and finite.

        Args:
            x: [B, H, M, D].
            counted: [B, H, M] bool; None: all rows.
            centred: Whether it is taken around the mean of these rows.

        Returns:
            [B, H, D, D] fp64, zeros where no row counts.
        """
        x = x.double()
        taken = torch.isfinite(x).all(-1, keepdim=True)  # [..., M, 1]
        if counted is not None:
            taken &= counted[..., None]
        count = taken.sum(-2, keepdim=True).clamp(min=1)
        x = torch.where(taken, x, 0.0)
        if centred:
            x = torch.where(taken, x - x.sum(-2, keepdim=True) / count, 0.0)
        return x.mT @ x / count

    def leading_factor(self, moment: Tensor, rank: int, exact: bool) -> Tensor:
        """F with F F^T = the second moment in its leading space, over its mean eigenvalue there. Any rotation
        of F's columns will do.

        Args:
            moment: [..., D, D], symmetric.
            rank: Dimensions of the leading space.
            exact: Whether the eigenvectors are wanted, leading ones first; an eigensolver makes a GPU wait.

        Returns:
            [..., D, rank] fp32.
        """
        if not exact:
            return subspace.leading_factor(moment, rank)
        values, vectors = self._eigh(moment.double())
        values, vectors = values[..., -rank:].flip(-1).clamp(min=0), vectors[..., -rank:].flip(-1)
        weights = values / values.mean(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
        return (vectors * weights.sqrt()[..., None, :]).float()

    def row_peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest finite magnitude of every row, and whether the whole row is finite.

        Args:
            x: [B, H, N, D].

        Returns:
            Peaks [B, H, N] fp32 (fp64 for fp64 rows), and finite [B, H, N] bool.
        """
        batch, heads, tokens, dim = x.shape
        working = torch.float64 if x.dtype == torch.float64 else torch.float32
        peaks = torch.empty(batch, heads, tokens, dtype=working, device=x.device)
        finite = torch.empty(batch, heads, tokens, dtype=torch.bool, device=x.device)
        step = chunk_rows(12 * batch * heads * dim, tokens)
        for start in range(0, tokens, step):
            part = x[:, :, start : start + step]
            good = torch.isfinite(part)
            finite[:, :, start : start + step] = good.all(-1)
            peaks[:, :, start : start + step] = torch.where(good, part.abs(), 0.0).amax(-1)
        return peaks, finite

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
        if on_cpu(out) and not lost.any():
            return out
        return torch.where(lost & out.isfinite(), torch.nan, out)

    def _only_finite(self, x: Tensor) -> Tensor:
        """x in fp32, zeros for NaN and Inf; maybe x itself."""
        return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)

    def _eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues of symmetric matrices [..., n, n] fp64, ascending, and eigenvectors in columns."""
        # the largest entry is scaled to 1: no overflow in the solver
        size = matrix.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
        values, vectors = torch.linalg.eigh(matrix / size)
        return values * size[..., 0], vectors

    def _leading_basis(self, matrix: Tensor, rank: int) -> Tensor:
        """Orthonormal columns that span about the leading eigenvectors of [..., n, n].  # [..., n, rank]"""
        return subspace.leading_basis(matrix.double(), rank)

"""Padding in joint attention: leaves tokens that no sample of the batch uses out of a sparse call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Rows
from .site import Ranges


@dataclass(frozen=True)
class Compact:
    """A call without the tokens whose own key is padding in every sample: nobody reads their rows, and
    computing them exactly, as text, would use up the budget of the video."""

    kept: Rows
    total: int

    def take(self, x: Tensor, dim: int = 2) -> Tensor:
        return self.kept.take(x, dim)

    def ranges(self, ranges: Ranges) -> Ranges:
        """Where ranges of tokens lie among the kept tokens."""
        moved = ((self._before(start), self._before(stop)) for start, stop in ranges)
        return tuple((start, stop) for start, stop in moved if stop > start)

    def put_back(self, out: Tensor) -> Tensor:
        """The output [B, H, kept, D] at its original positions, zeros where tokens were left out.  # [B, H,
        N, D]"""
        whole = out.new_zeros(*out.shape[:2], self.total, out.shape[-1])
        done = 0
        for start, stop in self.kept.ranges:
            whole[:, :, start:stop] = out[:, :, done : done + stop - start]
            done += stop - start
        return whole

    def _before(self, place: int) -> int:
        return sum(max(0, min(stop, place) - start) for start, stop in self.kept.ranges)


class PaddingReader:
    """Finds the tokens that are valid in any sample. Reading a mask waits for the device, and the layers of a
    forward pass share one mask, so the last result is remembered."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, Rows] | None = None

    def compact(self, mask: Tensor, valid: Tensor, queries: int) -> Compact | None:
        """How to leave padding out of a call, or None if there is nothing to leave out.

        Args:
            mask: The host's mask, which identifies the result.
            valid: The same as [B, Nk].
            queries: Nq; if it differs from Nk, a query has no key of its own.
        """
        if queries != valid.shape[1]:
            return None
        if self._last is None or self._last[0] is not mask or self._last[1] != changes(mask):
            self._last = (mask, changes(mask), _ranges(valid.any(0).cpu()))
        rows = self._last[2]
        return None if rows.count in (0, queries) else Compact(rows, queries)


def changes(x: Tensor) -> int:
    """How often a tensor was changed in place; 0 for tensors of inference mode, which do not count."""
    return 0 if x.is_inference() else x._version


def _ranges(valid: Tensor) -> Rows:
    """The True entries of a vector on the CPU, as ranges."""
    edges = torch.nn.functional.pad(valid.to(torch.int8), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return Rows(tuple(zip(starts, stops, strict=True)))

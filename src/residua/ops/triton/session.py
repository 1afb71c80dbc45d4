"""What the stages of one call share: rows in the order of their groups, gathered once, and what was noticed
about them on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class Session(threading.local):
    """Of the call that this thread is in. An entry holds the tensors by which it is known, so that no other
    tensor can take over their identity."""

    def __init__(self) -> None:
        self.active = False
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._lost: dict[int, tuple[Tensor, Tensor]] = {}
        self._sorted: dict[int, tuple[tuple[Tensor, Tensor], Tensor]] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, things are remembered; what a call outside of it remembered comes back afterwards."""
        outer = (self.active, self._rows, self._lost, self._sorted)
        self.active, self._rows, self._lost, self._sorted = True, {}, {}, {}
        try:
            yield
        finally:
            self.active, self._rows, self._lost, self._sorted = outer

    def rows(self, x: Tensor, order: Tensor) -> Tensor | None:
        """The rows of x in that order, if they are known."""
        found = self._rows.get((id(x), id(order)))
        return None if found is None else found[0]

    def hold_rows(self, x: Tensor, order: Tensor, rows: Tensor) -> None:
        if self.active:
            self._rows[id(x), id(order)] = (rows, x, order)

    def release_rows(self) -> None:
        """Nobody wants them again."""
        self._rows.clear()

    def lost(self, x: Tensor) -> Tensor | None:
        """Which channels of x are not finite (above 0), if somebody has looked.  # [B, Hkv, D]"""
        found = self._lost.get(id(x))
        return None if found is None else found[0]

    def note_lost(self, x: Tensor, lost: Tensor) -> None:
        if self.active:
            self._lost[id(x)] = (lost, x)

    def sorted(self, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Order and offsets of these labels, if they are known."""
        found = self._sorted.get(id(labels))
        return None if found is None else found[0]

    def hold_sorted(self, labels: Tensor, found: tuple[Tensor, Tensor]) -> None:
        if self.active:
            self._sorted[id(labels)] = (found, labels)


SESSION = Session()

"""What the stages of one call share: rows in the order of their groups, gathered once, and what was noticed about
them on the way."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Session:
    """Of one call. An entry is known by the tensors that it was found from, and holds them."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps  # outside of a call nothing is kept
        self._found: list[tuple[str, tuple[Tensor, ...], Any]] = []

    def find(self, what: str, *of: Tensor) -> Any:
        """What was kept of just these tensors, or None."""
        for name, known, found in self._found:
            if name == what and all(x is y for x, y in zip(known, of, strict=True)):
                return found
        return None

    def keep(self, what: str, found: Any, *of: Tensor) -> None:
        if self.keeps:
            self._found.append((what, of, found))

    def release(self, what: str) -> None:
        """Nobody wants it again."""
        self._found = [entry for entry in self._found if entry[0] != what]

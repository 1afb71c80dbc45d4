"""What a user must be told about a run, once: nothing ran sparse, the error is large, the backend is slow."""

import logging
from collections import Counter
from collections.abc import Iterable

from ..receipt import LARGE_ERROR, Receipt
from .dense_reasons import FIRST_LAYERS, FIRST_STEPS, Why

logger = logging.getLogger("residua.hosts")

MANY_DENSE_HEADS = 0.1  # share of heads that ran dense because of max_error


class RunWatch:
    """Follows one run of a host. Warnings go to the logger "residua.hosts", each once per run.

    Args:
        name: Name of the transformer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sparse = 0
        self.dense: Counter[Why] = Counter()
        self.warnings: list[str] = []
        self._errors: list[float] = []
        self._heads = 0
        self._dense_heads = 0
        self._said: set[str] = set()

    def dense_call(self, why: Why) -> bool:
        """Counts a dense call; True for the first one with its reason."""
        first = all(why.reason != known.reason for known in self.dense)
        self.dense[why] += 1
        return first

    def sparse_call(self, slow: str | None = None) -> None:
        """Counts a sparse call. `slow`: why its backend is a slow one. That was logged when the backend was
        chosen; the report repeats it."""
        self.sparse += 1
        if slow is not None and slow not in self.warnings:
            self.warnings.append(slow)

    def read(self, receipts: Iterable[Receipt]) -> None:
        """Adds the receipts of the run."""
        for receipt in receipts:
            if receipt.error is not None:
                self._errors.append(receipt.error)
            self._heads += sum(receipt.chosen.values())
            self._dense_heads += receipt.chosen.get("dense", 0)

    def speak(self) -> None:
        """Logs the remaining warnings about the run."""
        if self.dense and not self.sparse:
            self.warn("nothing", nothing_sparse(self.dense))
        error = sum(self._errors) / len(self._errors) if self._errors else 0.0
        if not error <= LARGE_ERROR:  # also true for NaN
            self.warn(
                "error",
                f"the estimated error of attention is {error:.2g}, above {LARGE_ERROR}: compare the result "
                "with a dense one; a higher density or a max_error keeps it lower",
            )
        if self._dense_heads > MANY_DENSE_HEADS * max(1, self._heads):
            self.warn(
                "heads",
                f"{self._dense_heads / self._heads:.0%} of the heads ran dense because they could not keep "
                "max_error: they cost more than dense attention; raise the density or max_error",
            )

    def warn(self, kind: str, message: str) -> None:
        """Logs a warning, once per run and kind."""
        if kind not in self._said:
            self._said.add(kind)
            self.warnings.append(message)
            logger.warning("%s: %s", self.name, message)


def nothing_sparse(dense: Counter[Why]) -> str:
    """One sentence about a run without a sparse call: the last reason, with its number.

    First steps and layers are dense in every run, so they are named only if there is no other reason.
    """
    deciding = [why for why in dense if why.reason not in (FIRST_STEPS, FIRST_LAYERS)] or list(dense)
    why = max(deciding, key=lambda found: dense[found])
    number = why.number or why.reason
    return f"nothing ran sparse: {number}; all {sum(dense.values()):,} calls were dense"

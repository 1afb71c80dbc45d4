"""The errors that calls and heads estimate, compared with their true errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..reports.table import share

FACTOR = 1.5  # an estimate within this factor of the true error counts as good
USUALLY = 0.9  # share of the estimates that should be


@dataclass(frozen=True)
class Estimates:
    """Distribution of estimate / true error."""

    calls: int
    low: float  # 5 %
    median: float
    high: float  # 95 %
    within: float  # share of calls within the factor

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float | None]]) -> Estimates | None:
        """The distribution for (true, estimated) errors, without calls that have no error or no estimate; None if there
        are no others."""
        known = comparable(pairs)
        if not known:
            return None
        ratios = torch.tensor([estimate / true for true, estimate in known], dtype=torch.float64)
        low, median, high = ratios.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        within = ((ratios <= FACTOR) & (ratios >= 1 / FACTOR)).double().mean()
        return cls(len(known), low, median, high, float(within))

    def __str__(self) -> str:
        return (
            f"median of est/true {self.median:.2f}, 5 to 95 %: {self.low:.2f} to {self.high:.2f}; "
            f"{share(self.within, 0)} of {self.calls} estimates within {FACTOR:g} x"
        )


def comparable(pairs: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The (true, estimated) errors of calls that have an error and an estimate of it."""
    known = [(true, estimate) for true, estimate in pairs if estimate is not None and true > 0]
    return [(true, estimate) for true, estimate in known if math.isfinite(true + estimate)]

"""The errors that calls estimate, compared with their true errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...reports.table import share
from ..reconstructions.measure import COMPARISON, DENSITIES, Run, at
from ..results import ALL

FACTOR = 1.5  # an estimate within this factor of the true error counts as good
ESTIMATING = {"anchored": "anchored", "probe": "probe: the paper's"}  # reconstructions with an error estimate


@dataclass(frozen=True)
class Spread:
    """Distribution of estimate / true error over calls."""

    calls: int
    low: float  # 5 %
    median: float
    high: float  # 95 %
    within: float  # share of calls within the factor

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Spread | None:
        """The distribution for (true, estimated) errors; None if there are none."""
        if not pairs:
            return None
        ratios = torch.tensor([estimate / true for true, estimate in pairs], dtype=torch.float64)
        low, median, high = ratios.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        within = ((ratios <= FACTOR) & (ratios >= 1 / FACTOR)).double().mean()
        return cls(len(pairs), low, median, high, float(within))

    def __str__(self) -> str:
        return (
            f"median of est/true {self.median:.2f}, 5 to 95 %: {self.low:.2f} to {self.high:.2f}; "
            f"{share(self.within, 0)} of {self.calls} estimates within {FACTOR:g} x"
        )


def pairs_of(
    results: Sequence[Run], reconstruction: str, model: str = ALL, densities: Sequence[float] = DENSITIES
) -> list[tuple[float, float]]:
    """True and estimated mean row error of each call and density; calls without an error are left out."""
    settings = {at(reconstruction, density) for density in densities}
    return [
        (item.mean, item.estimate)
        for item in results
        if item.table == COMPARISON and item.setting in settings and model in (ALL, item.model)
        if item.estimate is not None and item.mean > 0 and math.isfinite(item.mean + item.estimate)
    ]

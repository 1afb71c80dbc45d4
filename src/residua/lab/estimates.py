"""What a call says of its error, against what it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .repairs import COMPARISON, DENSITIES, Run, at
from .report import Finding
from .summary import ALL
from .tables import Table, share

FACTOR = 1.5
BIAS = 0.1  # an estimate whose median is off by no more than this share is called unbiased
USUALLY = 0.9  # of the calls


@dataclass(frozen=True)
class Spread:
    """Of estimate / true error over calls."""

    calls: int
    low: float  # 5 %
    median: float
    high: float  # 95 %
    within: float  # share of calls within the factor

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Spread | None:
        """Of (true, estimated) errors; None if there are none."""
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


def estimate_table(results: Sequence[Run]) -> Table:
    rows = []
    for reconstruction in ("anchored", "probe"):
        for densities in (*((density,) for density in DENSITIES), DENSITIES):
            found = Spread.of(pairs_of(results, reconstruction, densities=densities))
            if found is not None:
                where = share(densities[0], 0) if len(densities) == 1 else "all"
                figures = [f"{value:.2f}" for value in (found.median, found.low, found.high)]
                rows.append(
                    (f"{reconstruction}, {where}", f"{found.calls}", *figures, share(found.within, 0))
                )
    note = (
        "The receipt's error over the true mean error of the rows that were not probed. Anchored judges "
        "itself on scattered rows that no fit has seen (it chooses by them, among three). The paper's probes "
        "lie near the middle of their groups, and it is fitted to them: each is judged by the fit without it."
    )
    columns = ("estimate", "estimates", "median est/true", "5 %", "95 %", f"within {FACTOR:g} x")
    return Table("Estimated against true error", columns, tuple(rows), note, "anchored, all")


def estimate_findings(results: Sequence[Run]) -> list[Finding]:
    ours, paper = (Spread.of(pairs_of(results, reconstruction)) for reconstruction in ("anchored", "probe"))
    usual = f"Anchored knows its error within a factor of {FACTOR:g} in nine of ten calls"
    fair = f"Its estimate has no bias: the median of est/true is within {share(BIAS, 0)} of 1"
    looser = "Cross-validation over the paper's own probes does not: its estimate is biased or wider"
    if ours is None or paper is None:
        return [Finding(claim, None, "no estimates") for claim in (usual, fair, looser)]
    return [
        Finding(usual, ours.within >= USUALLY, str(ours)),
        Finding(fair, abs(ours.median - 1) <= BIAS, f"median of est/true {ours.median:.2f}"),
        Finding(
            looser, abs(paper.median - 1) > BIAS or paper.within < USUALLY, f"{_bias(paper.median)}; {paper}"
        ),
    ]


def _bias(median: float) -> str:
    return f"at the median it reads {share(abs(median - 1), 0)} too {'low' if median < 1 else 'high'}"

"""How good the error estimates are: a table, a figure, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from ...reports import figure
from ...reports.page import Finding, Picture
from ...reports.table import Table, share
from ..reconstructions.measure import DENSITIES, Run
from .measure import ESTIMATING, FACTOR, Spread, pairs_of

BIAS = 0.1  # an estimate whose median is off by at most this share counts as unbiased
USUALLY = 0.9  # share of the calls


def estimate_table(results: Sequence[Run]) -> Table:
    rows = []
    for reconstruction in ESTIMATING:
        for densities in (*((density,) for density in DENSITIES), DENSITIES):
            found = Spread.of(pairs_of(results, reconstruction, densities=densities))
            if found is not None:
                where = share(densities[0], 0) if len(densities) == 1 else "all"
                ratios = [f"{value:.2f}" for value in (found.median, found.low, found.high)]
                rows.append((f"{reconstruction}, {where}", f"{found.calls}", *ratios, share(found.within, 0)))
    note = (
        "The receipt's error over the true mean error of the rows that were not probed. Anchored checks "
        "itself on scattered rows that no fit has seen (it chooses by them, among three). The paper's probes "
        "lie near the middle of their groups, and it is fitted to them: the fit without it predicts each."
    )
    columns = ("estimate", "estimates", "median est/true", "5 %", "95 %", f"within {FACTOR:g} x")
    return Table("Estimated against true error", columns, tuple(rows), note, "anchored, all")


def estimate_picture(results: Sequence[Run], models: Sequence[str]) -> Picture:
    """Estimated over true error, a panel for each method that estimates."""
    scatter = {title: {model: pairs_of(results, name, model) for model in models} for name, title in ESTIMATING.items()}
    return Picture(
        "estimates",
        "What a call says of its error, and what it is",
        f"A point is one call at one density. Dashed: the same; shaded: within a factor of {FACTOR:g}.",
        figure.estimate_scatter(scatter, FACTOR),
    )


def estimate_findings(results: Sequence[Run]) -> list[Finding]:
    ours, paper = (Spread.of(pairs_of(results, reconstruction)) for reconstruction in ESTIMATING)
    usual = f"Anchored knows its error within a factor of {FACTOR:g} in nine of ten calls"
    fair = f"Its estimate has no bias: the median of est/true is within {share(BIAS, 0)} of 1"
    looser = "Cross-validation over the paper's own probes does not: its estimate is biased or wider"
    if ours is None or paper is None:
        return [Finding(claim, None, "no estimates") for claim in (usual, fair, looser)]
    return [
        Finding(usual, ours.within >= USUALLY, str(ours)),
        Finding(fair, abs(ours.median - 1) <= BIAS, f"median of est/true {ours.median:.2f}"),
        Finding(looser, abs(paper.median - 1) > BIAS or paper.within < USUALLY, f"{_bias(paper.median)}; {paper}"),
    ]


def _bias(median: float) -> str:
    return f"at the median it reads {share(abs(median - 1), 0)} too {'low' if median < 1 else 'high'}"

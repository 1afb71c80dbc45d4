"""The error of one variant on one call, and averages per model as tables and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..reports.page import Finding
from ..reports.table import Table, pair, share

ALL = "all calls"


@dataclass(frozen=True)
class Result:
    """Error of one variant on one call."""

    table: str
    setting: str
    model: str
    call: str
    mean: float
    p99: float
    density: float  # evaluated pairs over all, including probe rows that are used
    budget: float | None = field(default=None, kw_only=True)  # what it was allowed to evaluate, if that is matched

    @property
    def over(self) -> float:
        """How far it is above its budget: every query group keeps a cell, whatever that costs."""
        return 0.0 if self.budget is None else max(0.0, self.density - self.budget - 1e-9)


def models_of(results: Iterable[Result]) -> list[str]:
    """Model names in order, and `all calls` if there are several."""
    found = list(dict.fromkeys(result.model for result in results))
    return [*found, ALL] if len(found) > 1 else found


def of(results: Sequence[Result], table: str, setting: str, model: str = ALL) -> list[Result]:
    return [item for item in results if item.table == table and item.setting == setting and model in (ALL, item.model)]


def average(results: Sequence[Result]) -> tuple[float, float, float]:
    """Mean over calls of mean error, p99 error and density."""
    return (
        fmean(item.mean for item in results),
        fmean(item.p99 for item in results),
        fmean(item.density for item in results),
    )


def settings_of(results: Sequence[Result], table: str) -> list[str]:
    return list(dict.fromkeys(item.setting for item in results if item.table == table))


def by_model(
    results: Sequence[Result], table: str, title: str, first: str, note: str, emphasis: str | None = None
) -> Table:
    """A row per setting: mean / p99 for every model, and the density that was evaluated."""
    models = models_of(item for item in results if item.table == table)
    rows = []
    for setting in settings_of(results, table):
        found = [of(results, table, setting, model) for model in models]
        cells = [pair(*average(calls)[:2]) if calls else "-" for calls in found]
        rows.append((setting, *cells, share(average(of(results, table, setting))[2])))
    return Table(title, (first, *models, "executed pairs"), tuple(rows), note, emphasis)


def compared(results: Sequence[Result], table: str, lower: str, upper: str, claim: str) -> Finding:
    """Whether `lower` has the smaller mean and p99 error, for every model."""
    below, above = of(results, table, lower), of(results, table, upper)
    if not below or len(below) != len(above):
        return Finding(claim, None, "no such calls")
    wins = sum(a.mean < b.mean for a, b in zip(below, above, strict=True))
    (mean, p99, _), (other, other_p99, _) = average(below), average(above)
    lowered = {
        f"{which} of {model}": average(of(results, table, lower, model))[place]
        < average(of(results, table, upper, model))[place]
        for model in dict.fromkeys(item.model for item in below)
        for place, which in enumerate(("mean", "p99"))
    }
    evidence = (
        f"mean {mean:.4f} against {other:.4f} ({100 * (mean / other - 1):+.1f} %), p99 {p99:.4f} against "
        f"{other_p99:.4f} ({100 * (p99 / other_p99 - 1):+.1f} %); lower mean in {wins} of {len(below)} calls"
    )
    higher = [name for name, less in lowered.items() if not less]
    if 0 < len(higher) < len(lowered):
        return Finding(claim, False, f"{evidence}; higher: {', '.join(higher)}", mixed=True)
    return Finding(claim, not higher, evidence)

"""What every study shares: progress, the calls for a quick look, errors by setting and model, verdicts, the report."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, TypeVar

from ...config import Config
from ..capture.captures import CapturedCall
from ..reports.page import Finding, Page
from ..reports.table import Table, pair, share

QUICK_CALLS = 4  # for a quick look
MIN_TOKENS = 4096  # calls shorter than this do not confirm or contradict a claim
ALL = "all calls"
ERRORS = ("mean", "p99")  # of the rows of a call

Watch = Callable[[int, int, str], None]  # calls done, calls in all, name of the next
T = TypeVar("T")
R = TypeVar("R", bound="Result")


def watched(work: Sequence[T], watch: Watch | None, named: Callable[[T], str] = str) -> Iterator[T]:
    """Yields the calls, or other pieces of work, in turn; each is announced before it is done."""
    for place, piece in enumerate(work):
        if watch is not None:
            watch(place, len(work), named(piece))
        yield piece
    if watch is not None:
        watch(len(work), len(work), "done")


def some(calls: Sequence[CapturedCall], quick: bool) -> list[CapturedCall]:
    """The calls; for a quick look a few of them, evenly spaced."""
    number = min(QUICK_CALLS, len(calls)) if quick else len(calls)
    return [calls[place * len(calls) // number] for place in range(number)]


def make_page(
    chosen: Sequence[CapturedCall],
    calls: Sequence[CapturedCall],
    config: Config,
    results: Sequence[Any],
    findings: Sequence[Finding],
    facts: Mapping[str, str] | None = None,
    **parts: Any,
) -> Page:
    """The report of a study: `parts` are those of the Page, `facts` footnotes beyond (or instead of) which calls were
    chosen, how long they are, and the density."""
    tokens = sorted({call.tokens for call in chosen})
    usual = {
        "calls": f"{len(chosen)} of {len(calls)} captured, one head each",
        "models": ", ".join(dict.fromkeys(call.model for call in chosen)),
        "tokens": ", ".join(f"{count:,}" for count in tokens),
        "density": f"target {share(config.density)}; probe rows are paid for, used or not",
        "error": "per row, |out - dense| / |dense|",
    }
    data = {"results": [asdict(item) for item in results], "config": config.to_dict()}
    return Page(findings=weighed(findings, chosen), facts=usual | dict(facts or {}), **{"data": data, **parts})


def weighed(findings: Sequence[Finding], chosen: Sequence[CapturedCall]) -> list[Finding]:
    """The findings without verdicts if the calls are too short: groups of a few rows and budgets of a few cells say
    nothing about a model at its real length."""
    longest = max(call.tokens for call in chosen)
    if longest >= MIN_TOKENS:
        return list(findings)
    instead = "too short to tell"
    evidence = f"calls of {longest:,} tokens; wanted {MIN_TOKENS:,} or more"
    return [
        item if item.any_length else replace(item, instead=instead, evidence=f"{item.evidence} ({evidence})")
        for item in findings
    ]


def decided(claim: str, holds: Sequence[bool | None], evidence: str) -> Finding:
    """A claim that is confirmed if it holds for all models (or cases), and mixed if for some."""
    return Finding(claim, all(holds), evidence, mixed=len(set(holds)) > 1)


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


def models_of(results: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(result.model for result in results))


def columns_of(results: Sequence[Result], table: str | None = None) -> list[str]:
    """The models of a table, and `all calls` if there are several."""
    found = models_of([result for result in results if table in (None, result.table)])
    return [*found, ALL] if len(found) > 1 else found


def settings_of(results: Sequence[Result], table: str) -> list[str]:
    return list(dict.fromkeys(item.setting for item in results if item.table == table))


def of(results: Sequence[R], table: str, setting: str, model: str = ALL) -> list[R]:
    return [item for item in results if item.table == table and item.setting == setting and model in (ALL, item.model)]


def average(results: Sequence[Result]) -> tuple[float, float, float]:
    """Mean over calls of mean error, p99 error and density."""
    return fmean(r.mean for r in results), fmean(r.p99 for r in results), fmean(r.density for r in results)


def rows_of(results: Sequence[Result], table: str, settings: Mapping[str, str]) -> list[tuple[str, ...]]:
    """A row per title and its setting: mean / p99 for every model, and the density that was evaluated."""
    rows = []
    for title, setting in settings.items():
        found = [of(results, table, setting, model) for model in columns_of(results, table)]
        cells = [pair(*average(calls)[:2]) if calls else "-" for calls in found]
        rows.append((title, *cells, share(average(of(results, table, setting))[2])))
    return rows


def by_model(
    results: Sequence[Result], table: str, title: str, first: str, note: str, emphasis: str | None = None
) -> Table:
    """A row per setting of a table."""
    rows = rows_of(results, table, {setting: setting for setting in settings_of(results, table)})
    return Table(title, (first, *columns_of(results, table), "executed pairs"), tuple(rows), note, emphasis)


def curves_of(
    models: Sequence[str], names: Iterable[str], curve: Callable[[str, str, int], list[tuple[float, float]]]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Panels of a figure, for each model one with mean and one with p99 errors: the curve of every name."""
    return {
        f"{model}: {error}": {name: curve(name, model, place) for name in names}
        for model in models
        for place, error in enumerate(ERRORS)
    }


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
        for model in models_of(below)
        for place, which in enumerate(ERRORS)
    }
    evidence = (
        f"mean {mean:.4f} against {other:.4f} ({100 * (mean / other - 1):+.1f} %), p99 {p99:.4f} against "
        f"{other_p99:.4f} ({100 * (p99 / other_p99 - 1):+.1f} %); lower mean in {wins} of {len(below)} calls"
    )
    higher = [name for name, less in lowered.items() if not less]
    if 0 < len(higher) < len(lowered):
        evidence += f"; higher: {', '.join(higher)}"
    return decided(claim, list(lowered.values()), evidence)

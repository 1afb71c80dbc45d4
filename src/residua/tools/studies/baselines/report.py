"""The study of the rivals as tables, findings and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from ....baselines import RIVALS, find
from ...reports import figure as figures
from ...reports.page import Finding, Page, Picture
from ...reports.table import Table, share
from .measure import Measurement, Refusal, StudySettings

PAPER, OURS = "paper", "anchored"
ERROR_COLUMNS = ("method", "mean", "p99", "held-out mean", "p99", "won")
COST_COLUMNS = ("method", "charged", "density", "skipped mass", "beside", "grouping", "CPU ms")
ERROR_NOTE = (
    "norm(out - dense) / norm(dense) per row, averaged over calls. Held-out: rows that no method "
    "has probed. Won: calls with a lower mean error than SparsePR's on those rows."
)
COST_NOTE = (
    "Charged: what counts against the target. Density: exact query-key pairs. Skipped mass: attention that "
    "the kept cells miss. Beside: products for prediction and compensation; grouping: products of k-means "
    "from a cold start; both as shares of the pairs of dense attention, reported and not charged. Anchored "
    "is charged for what is beside its pairs. CPU ms: the whole method, median over calls."
)


def models(found: Sequence[Measurement]) -> list[str]:
    return list(dict.fromkeys(item.model for item in found))


def of(found: Sequence[Measurement], model: str, method: str) -> list[Measurement]:
    return [item for item in found if item.model == model and item.method == method]


def methods(found: Sequence[Measurement], model: str) -> list[str]:
    return list(dict.fromkeys(item.method for item in found if item.model == model))


def average(items: Sequence[Measurement], name: str) -> float:
    return statistics.fmean(getattr(item, name) for item in items)


def better_calls(found: Sequence[Measurement], model: str, method: str) -> str:
    """In how many calls a method has less error than SparsePR."""
    ours = {item.call: item.held_out_mean for item in of(found, model, PAPER)}
    if method == PAPER or RIVALS[method].reference or not ours:
        return ""
    theirs = [item for item in of(found, model, method) if item.call in ours]
    return f"{sum(item.held_out_mean < ours[item.call] for item in theirs)} of {len(theirs)}"


def error_table(found: Sequence[Measurement], refused: Sequence[Refusal], model: str) -> Table:
    rows = []
    for method in methods(found, model):
        items = of(found, model, method)
        names = ("mean", "p99", "held_out_mean", "held_out_p99")
        errors = [f"{average(items, name):.4f}" for name in names]
        rows.append((RIVALS[method].title, *errors, better_calls(found, model, method)))
    calls = len({item.call for item in found if item.model == model})
    left_out = [f"Not run: {RIVALS[r.method].title}: {r.reason}." for r in refused if r.model == model]
    note = " ".join([ERROR_NOTE, *left_out])
    return Table(f"{model}, {calls} calls: error", ERROR_COLUMNS, tuple(rows), note, RIVALS[OURS].title)


def cost_table(found: Sequence[Measurement], model: str, target: float) -> Table:
    rows = []
    for method in methods(found, model):
        items = of(found, model, method)
        mass = [item.skipped_mass for item in items if item.skipped_mass is not None]
        rows.append(
            (
                RIVALS[method].title,
                share(average(items, "charged"), 2),
                share(average(items, "density"), 2),
                share(statistics.fmean(mass)) if mass else "",
                share(average(items, "beside")),
                share(average(items, "grouping"), 0),
                f"{1e3 * statistics.median(item.cpu_seconds for item in items):.0f}",
            )
        )
    note = " ".join([COST_NOTE, *over_target(found, model, target)])
    return Table(f"{model}: cost", COST_COLUMNS, tuple(rows), note, RIVALS[OURS].title)


def over_target(found: Sequence[Measurement], model: str, target: float) -> list[str]:
    """Notes about calls above the target: every query group keeps at least one cell, which can exceed a small
    budget on a short call."""
    lines = []
    for method in methods(found, model):
        items = of(found, model, method)
        over = [item.charged for item in items if item.charged > target + 1e-9]
        if over and method != "dense":
            worst = f"in {len(over)} of {len(items)} calls, by {share(max(over) - target, 2)} at most"
            lines.append(f"Above the target: {RIVALS[method].title} {worst}.")
    return lines


def sources(names: Sequence[str]) -> dict[str, str]:
    """The source of every method, and what is simplified here."""
    return {rival.title: f"{rival.source}. Simplified: {rival.simplified}." for rival in find(list(names))}


def findings(found: Sequence[Measurement]) -> list[Finding]:
    """Per model: whether the paper's method has the smallest error of the published ones, and anchored
    reconstruction that of all usable ones."""
    made = []
    for model in models(found):
        errors = {
            method: average(of(found, model, method), "held_out_mean")
            for method in methods(found, model)
            if not RIVALS[method].reference
        }
        others = {method: error for method, error in errors.items() if method != OURS}
        made += [*_least(model, PAPER, others, "rival"), *_least(model, OURS, errors, "other method")]
    return made


def _least(model: str, method: str, errors: dict[str, float], kind: str) -> list[Finding]:
    rivals = {name: error for name, error in errors.items() if name != method}
    if method not in errors or not rivals:
        return []
    best = min(rivals, key=rivals.__getitem__)
    evidence = f"{errors[method]:.4f}; the best {kind} is {RIVALS[best].title} with {rivals[best]:.4f}"
    name = RIVALS[method].title.removesuffix(" (Residua)")
    whom = " of the published methods" if method == PAPER else ", everything charged"
    claim = f"{model}: {name} has the least mean error on held-out rows{whom}"
    return [Finding(claim, errors[method] <= rivals[best], evidence)]


def figure(found: Sequence[Measurement]) -> Picture:
    """Errors as bars, the best at the top, a panel per model, with the CPU time beside each."""
    panels = {}
    for model in models(found):
        panels[model] = [
            (
                RIVALS[method].title,
                error,
                f"{error:.4f}" + ("" if RIVALS[method].reference else f", {milliseconds:.0f} ms"),
            )
            for method, error, milliseconds in bars_of(found, model)
        ]
    references = [rival.title for rival in RIVALS.values() if rival.reference]
    caption = (
        "Mean over the calls of a model, on rows that no method has probed; CPU time of the whole method. "
        "Blue: Residua's own method, which is charged for everything. Light: not a method that could be run."
    )
    drawing = figures.ranked(panels, "mean relative row error", RIVALS[OURS].title, references)
    return Picture("rivals", "Error at the same density", caption, drawing)


def bars_of(found: Sequence[Measurement], model: str) -> list[tuple[str, float, float]]:
    """Method, mean error, CPU milliseconds; without dense attention, which has no error."""
    made = []
    for method in methods(found, model):
        items = of(found, model, method)
        if method != "dense":
            milliseconds = 1e3 * statistics.median(item.cpu_seconds for item in items)
            made.append((method, average(items, "held_out_mean"), milliseconds))
    return made


def make_report(
    found: Sequence[Measurement], refused: Sequence[Refusal], settings: StudySettings, command: str
) -> Page:
    names = list(dict.fromkeys(item.method for item in found))
    calls = len({(item.model, item.call) for item in found})
    tables = [
        table
        for model in models(found)
        for table in (error_table(found, refused, model), cost_table(found, model, settings.density))
    ]
    return Page(
        title=f"Training-free methods at {settings.density:.0%} of the pairs",
        lead=(
            f"{len(names)} methods on {calls} recorded calls, each with the same budget of exact query-key "
            "pairs, the same group counts and the same attention backend; anchored pays for all its work "
            "from that budget. All but SDPA are research code in PyTorch around that backend: their times "
            "compare with each other, not with the authors' kernels."
        ),
        command=command,
        tables=tables,
        pictures=[figure(found)] if set(names) - {"dense"} else [],
        findings=findings(found),
        facts={
            "target": f"{settings.density:g}",
            "repeats": f"{settings.repeats}, the median is reported",
            "threads": str(torch.get_num_threads()),
            "groups": "as many as Residua takes" if settings.groups is None else str(settings.groups),
            "backend": ", ".join(sorted({item.backend for item in found})),
            **sources(names),
        },
        data={"measurements": [item.to_dict() for item in found], "refused": [vars(item) for item in refused]},
    )

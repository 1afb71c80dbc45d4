"""`residua reconstructions`: what every reconstruction achieves with the same budget, as one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from ....config import Config
from ...capture.captures import CapturedCall
from ...reports import figure
from ...reports.page import Finding, Page, Picture
from ...reports.table import Table, pair, share
from ..common import Watch, facts, few, weighed
from ..estimates.report import estimate_findings, estimate_picture, estimate_table
from ..results import ALL, average, models_of, of, settings_of
from .measure import AS_IT_IS, COMPARED, COMPARISON, DENSITIES, INGREDIENTS, SAME_COST, SIMPLER, Run, at, measure

TITLES = {"none": "none: hard drop", "probe": "probe: the paper's", "tail": "tail", "anchored": "anchored"}
LONG = 16_384  # tokens from which the fixed cost of a summary is small
WORSE = 1.05  # a call that is worse than a simpler method by more than this factor gets a line

UNPROBED = "Mean / p99 of the relative row error, rows that the variant has not probed, averaged over calls."
CHARGED = "The target pays for all of tail and anchored; the routing of the first two is not charged."
COST = (
    "all work of a receipt (pairs, probes, routing, summary, choosing) as a share of dense attention; "
    "grouping is time, not attention, and not in it"
)


def compare_reconstructions(
    calls: Sequence[CapturedCall], config: Config, command: str, quick: bool = False, watch: Watch | None = None
) -> Page:
    chosen = few(calls) if quick else list(calls)
    results = measure(chosen, config, quick, watch)
    return Page(
        title="Reconstructions of skipped attention at equal cost",
        lead="What stands for the pairs that a call skips: nothing, the paper's fit on probe rows, centres "
        "of the skipped groups, or an expansion around the anchors; and whether a call knows how far off it "
        "is.",
        command=command,
        tables=[
            *(comparison_table(results, density) for density in DENSITIES),
            *worse_tables(results),
            *ingredient_tables(results, config.density),
            estimate_table(results),
        ],
        pictures=pictures(results),
        findings=weighed([*reconstruction_findings(results), *estimate_findings(results)], chosen),
        facts=facts(chosen, calls, config)
        | {
            "density": f"targets {', '.join(share(density, 0) for density in DENSITIES)}; ingredients at "
            f"{share(config.density)}",
            "cost": COST,
            "calls through": "residua.attention, cold, one head at a time",
        },
        data={"results": [asdict(item) for item in results], "config": config.to_dict()},
    )


def runs_of(results: Sequence[Run], table: str, setting: str, model: str = ALL) -> list[Run]:
    return [item for item in of(results, table, setting, model) if isinstance(item, Run)]


def mean_cost(runs: Sequence[Run]) -> float:
    return sum(item.cost for item in runs) / len(runs)


def _rows(results: Sequence[Run], table: str, settings: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    """A line for each title and its setting: errors per model, exact pairs and cost over all calls."""
    models = models_of(item for item in results if item.table == table)
    lines = []
    for title, setting in settings.items():
        cells = [pair(*average(of(results, table, setting, model))[:2]) for model in models]
        every = runs_of(results, table, setting)
        lines.append((title, *cells, share(average(every)[2]), share(mean_cost(every))))
    return tuple(lines)


def comparison_table(results: Sequence[Run], density: float) -> Table:
    models = models_of(item for item in results if item.table == COMPARISON)
    settings = {TITLES[reconstruction]: at(reconstruction, density) for reconstruction in COMPARED}
    return Table(
        f"Reconstructions at {share(density, 0)}",
        ("reconstruction", *models, "exact pairs", "cost"),
        _rows(results, COMPARISON, settings),
        f"{UNPROBED} {CHARGED}",
        TITLES["anchored"],
    )


def ingredient_tables(results: Sequence[Run], density: float) -> list[Table]:
    """One table; none after a quick look."""
    settings = settings_of(results, INGREDIENTS)
    if not settings:
        return []
    models = models_of(item for item in results if item.table == INGREDIENTS)
    note = (
        f"{UNPROBED} One thing changed at a time, all within the same cost. More slots than K/V groups, or a "
        "higher rank than the head dim, are cut to that."
    )
    return [
        Table(
            f"Ingredients of anchored reconstruction at {share(density, 0)}",
            ("setting", *models, "exact pairs", "cost"),
            _rows(results, INGREDIENTS, {setting: setting for setting in settings}),
            note,
            AS_IT_IS,
        )
    ]


def against_simpler(results: Sequence[Run], density: float) -> list[tuple[Run, Run]]:
    """Anchored on each call at one density, and the better of hard drop and the paper's method at the same
    cost."""
    best: dict[tuple[str, str], Run] = {}
    for name in SIMPLER:
        for item in runs_of(results, SAME_COST, at(name, density)):
            key = (item.model, item.call)
            best[key] = min(best.get(key, item), item, key=lambda run: run.mean)
    ours = runs_of(results, COMPARISON, at("anchored", density))
    return [(item, best[item.model, item.call]) for item in ours if (item.model, item.call) in best]


def worse_calls(results: Sequence[Run]) -> list[tuple[Run, Run]]:
    """The calls in which anchored has a larger mean error than a simpler method at the same cost."""
    both = [found for density in DENSITIES for found in against_simpler(results, density)]
    return [(ours, other) for ours, other in both if ours.mean > WORSE * other.mean]


def worse_tables(results: Sequence[Run]) -> list[Table]:
    """One table; none if there is nothing to list."""
    worse = worse_calls(results)
    if not worse:
        return []
    rows = tuple(
        (
            f"{ours.model} {ours.call}",
            share(ours.target, 0),
            f"{ours.mean:.2g}",
            "-" if ours.estimate is None else f"{ours.estimate:.2g}",
            f"{other.mean:.2g}",
            other.setting.partition(" @")[0],
            ours.chosen or "-",
        )
        for ours, other in worse
    )
    columns = ("call", "target", "anchored", "its estimate", "simpler", "which", "it chose")
    notes = dict.fromkeys(note for ours, _ in worse for note in ours.notes)
    note = f"Mean row error of anchored above {WORSE:g} x that of a simpler method at the same cost, routing "
    note += "included."
    if notes:
        note += f" Their receipts say: {'; '.join(notes)}."
    return [Table("Calls on which anchored is worse", columns, rows, note)]


def at_most(
    results: Sequence[Run], ours: str, theirs: str, claim: str, factor: float = 1.0, p99: bool = False, tokens: int = 0
) -> Finding:
    """Whether, for every model, the mean error of `ours` is at most `factor` times that of `theirs` and its
    p99 not higher; only calls of at least that many tokens."""
    long = [item for item in results if item.tokens >= tokens]
    left, right = runs_of(long, COMPARISON, ours), runs_of(long, COMPARISON, theirs)
    if not left or len(left) != len(right):
        return Finding(claim, None, "no such calls")
    kept = {}
    for model in dict.fromkeys(item.model for item in left):
        a, b = (average(of(long, COMPARISON, setting, model)) for setting in (ours, theirs))
        kept[f"mean of {model} ({a[0]:.4f} against {b[0]:.4f})"] = a[0] <= factor * b[0]
        if p99:
            kept[f"p99 of {model} ({a[1]:.4f} against {b[1]:.4f})"] = a[1] <= b[1]
    a, b = average(left), average(right)
    evidence = (
        f"mean {a[0]:.4f} against {b[0]:.4f}{_times(a[0], b[0])}, p99 {a[1]:.4f} against {b[1]:.4f}"
        f"{_times(a[1], b[1])}; {len(left)} calls"
    )
    broken = [name for name, fine in kept.items() if not fine]
    if broken:
        evidence += f"; not kept: {', '.join(broken)}"
    return Finding(claim, not broken, evidence, mixed=0 < len(broken) < len(kept))


def _times(value: float, other: float) -> str:
    return f" ({value / other:.2f} x)" if other > 0 else ""


def reconstruction_findings(results: Sequence[Run]) -> list[Finding]:
    paper = at("probe", 0.22)
    return [
        at_most(
            results,
            at("anchored", 0.22),
            paper,
            "Anchored at 22 % has at most 0.4 x the mean error of the paper's method at 22 %, and no higher p99",
            factor=0.4,
            p99=True,
        ),
        at_most(
            results,
            at("anchored", 0.14),
            paper,
            "Anchored at 14 % has no more mean error than the paper's method at 22 %",
        ),
        at_most(
            results,
            at("anchored", 0.08),
            paper,
            f"Anchored at 8 % has no more mean error than the paper's method at 22 %, calls of {LONG:,} tokens or more",
            tokens=LONG,
        ),
        _nowhere_worse(results),
    ]


def _nowhere_worse(results: Sequence[Run]) -> Finding:
    claim = (
        "Anchored is on no call worse than the better of hard drop and the paper's method at the same cost "
        "by more than 5 %"
    )
    total = sum(len(against_simpler(results, density)) for density in DENSITIES)
    if not total:
        return Finding(claim, None, "no such calls")
    worse = worse_calls(results)
    evidence = f"{len(worse)} of {total} pairs of call and density"
    if worse:
        counts = Counter(ours.target for ours, _ in worse)
        where = ", ".join(f"{count} at {share(density, 0)}" for density, count in counts.items())
        ours, other = max(worse, key=lambda both: both[0].mean / both[1].mean)
        evidence += (
            f" ({where}; all in a table); the worst: {ours.model} {ours.call} at {share(ours.target, 0)}, "
            f"{ours.mean:.4f} against {other.mean:.4f}, it chose {ours.chosen or 'nothing'}"
        )
    return Finding(claim, not worse, evidence)


def pictures(results: Sequence[Run]) -> list[Picture]:
    models = [model for model in models_of(results) if model != ALL]
    panels = {
        f"{model}: {name}": {
            TITLES[reconstruction]: [_point(results, reconstruction, density, model, place) for density in DENSITIES]
            for reconstruction in COMPARED
        }
        for model in models
        for place, name in enumerate(("mean", "p99"))
    }
    return [
        Picture(
            "reconstructions",
            "Error over cost",
            "Cost of everything but grouping, as the receipts have it, at the targets of the tables; the "
            "routing of hard drop and of the paper's method is in it too.",
            figure.curves(panels, "cost, % of dense attention", "row error", log=True, residua=[TITLES["anchored"]]),
        ),
        estimate_picture(results, models),
    ]


def _point(results: Sequence[Run], reconstruction: str, density: float, model: str, place: int) -> tuple[float, float]:
    runs = runs_of(results, COMPARISON, at(reconstruction, density), model)
    return 100 * mean_cost(runs), average(runs)[place]

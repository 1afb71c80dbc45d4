"""`residua reconstructions`: what every reconstruction achieves with the same budget, and whether a call knows how far
off it is. Every number is that of a whole call through
`residua.attention`, from a cold start; errors are those of rows that the call has not computed exactly."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...config import Config
from ...method.sizes import Sizes
from ...receipt import Receipt
from ..capture.captures import CapturedCall
from ..reports import figure
from ..reports.page import Finding, Page, Picture
from ..reports.table import Table, share
from .estimates import FACTOR, USUALLY, Estimates, comparable
from .study import (
    ALL,
    Result,
    Watch,
    average,
    columns_of,
    curves_of,
    decided,
    make_page,
    models_of,
    of,
    rows_of,
    settings_of,
    some,
    watched,
)
from .subject import Subject

DENSITIES = (0.02, 0.03, 0.05, 0.08, 0.14, 0.22, 0.35)
COMPARED = {"none": "none: hard drop", "probe": "probe: the paper's", "tail": "tail", "anchored": "anchored"}  # titles
DRIFT_RANKS = (0, 8, 32)
SLOTS = (32, 64, 128, 256)

COMPARISON, SAME_COST, INGREDIENTS = "reconstructions", "same cost", "ingredients"
SIMPLER = ("none", "probe")  # their density counts exact pairs alone
AS_IT_IS = "as it is"
ESTIMATING = {"anchored": "anchored", "probe": "probe: the paper's"}  # reconstructions with an error estimate
BIAS = 0.1  # an estimate whose median is off by at most this share counts as unbiased
LONG = 16_384  # tokens from which the fixed cost of a summary is small
WORSE = 1.05  # a call that is worse than a simpler method by more than this factor gets a line

UNPROBED = "Mean / p99 of the relative row error, rows that the variant has not probed, averaged over calls."
CHARGED = "The target pays for all of tail and anchored; the routing of the first two is not charged."
COST = (
    "all work of a receipt (pairs, probes, routing, summary, choosing) as a share of dense attention; "
    "grouping is time, not attention, and not in it"
)


@dataclass(frozen=True)
class Run(Result):
    """One call under one setting; `density` is that of its exact pairs."""

    target: float
    tokens: int
    cost: float  # in all, as in the receipt
    estimate: float | None  # the receipt's error estimate
    chosen: str  # what the head chose, if the reconstruction has a choice
    notes: tuple[str, ...]


class Bench:
    """One captured call under many settings."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._done: dict[Config, tuple[tuple[float, float], Receipt]] = {}

    def compare(self, config: Config, densities: Sequence[float]) -> Iterator[Run]:
        """Every reconstruction at every density; the setting is `reconstruction @ density`. Those that
        are not charged for their routing are measured once more with as many pairs less."""
        for density in densities:
            for reconstruction in COMPARED:
                changed = config.replace(reconstruction=reconstruction, density=density)
                found = self.run(COMPARISON, at(reconstruction, density), changed)
                yield found
                left = density - (found.cost - found.density)
                if reconstruction in SIMPLER and left > 0:
                    changed = changed.replace(density=left)
                    yield self.run(SAME_COST, at(reconstruction, density), changed)

    def take_apart(self, config: Config) -> Iterator[Run]:
        """Anchored reconstruction with one thing changed at a time, at the density of the config."""
        for setting, changed in ingredients(config, self.subject.sizes(config)).items():
            yield self.run(INGREDIENTS, setting, changed)

    def run(self, table: str, setting: str, config: Config) -> Run:
        key, captured = as_resolved(config, self.subject.sizes(config)), self.subject.captured
        if key not in self._done:
            out, receipt = self.subject.attend(config)
            self._done[key] = self.subject.errors_at(out, probed(receipt)), receipt
        errors, receipt = self._done[key]
        chosen = ", ".join(name for name, heads in receipt.chosen.items() if heads)
        call = (captured.model, captured.name, *errors, receipt.density, config.density, captured.tokens)
        return Run(table, setting, *call, receipt.cost, receipt.error, chosen, receipt.notes)


def probed(receipt: Receipt) -> Tensor:
    """The rows that a call computed exactly as probes.  # [M] int64"""
    rows = receipt.probe_rows
    return torch.empty(0, dtype=torch.long) if rows is None else rows.flatten()


def at(reconstruction: str, density: float) -> str:
    return f"{reconstruction} @ {density:g}"


def as_resolved(config: Config, sizes: Sizes) -> Config:
    """The config with the sizes that the call really uses: two configs with the same sizes are the same
    call."""
    return config.replace(
        query_groups=sizes.query_groups,
        kv_groups=sizes.kv_groups,
        probes=sizes.probes,
        summary_slots=sizes.single_slots + sizes.merged_slots,
        drift_rank=sizes.drift_rank,
    )


def ingredients(config: Config, sizes: Sizes) -> dict[str, Config]:
    base = config.replace(reconstruction="anchored")
    query, kv = sizes.query_groups, sizes.kv_groups
    made = {AS_IT_IS: base}
    for rank in DRIFT_RANKS:
        made[f"drift rank {rank}" if rank else "without drift"] = base.replace(drift_rank=rank)
    made |= {f"{slots} slots": base.replace(summary_slots=slots) for slots in SLOTS}
    return made | {
        "half the query groups": base.replace(query_groups=max(1, query // 2)),
        "twice the query groups": base.replace(query_groups=2 * query),
        "half the K/V groups": base.replace(kv_groups=max(1, kv // 2)),
        "twice the K/V groups": base.replace(kv_groups=2 * kv),
    }


@torch.no_grad()
def measure(
    calls: Sequence[CapturedCall], config: Config, quick: bool = False, watch: Watch | None = None
) -> list[Run]:
    """Every setting on every call, one call in memory at a time."""
    results: list[Run] = []
    for captured in watched(calls, watch):
        bench = Bench(Subject(captured, config))
        results += bench.compare(config, DENSITIES)
        if not quick:
            results += bench.take_apart(config)
    return results


def compare_reconstructions(
    calls: Sequence[CapturedCall], config: Config, command: str, quick: bool = False, watch: Watch | None = None
) -> Page:
    chosen = some(calls, quick)
    results = measure(chosen, config, quick, watch)
    return make_page(
        chosen,
        calls,
        config,
        results,
        [*reconstruction_findings(results), *estimate_findings(results)],
        {
            "density": f"targets {', '.join(share(density, 0) for density in DENSITIES)}; ingredients at "
            f"{share(config.density)}",
            "cost": COST,
            "calls through": "residua.attention, cold, one head at a time",
        },
        title="Reconstructions of skipped attention at equal cost",
        lead="What stands for the pairs that a call skips: nothing, the paper's fit on probe rows, centres "
        "of the skipped groups, or an expansion around the anchors; and whether a call knows how far off it is.",
        command=command,
        tables=[
            *(comparison_table(results, density) for density in DENSITIES),
            *worse_tables(results),
            *ingredient_tables(results, config.density),
            estimate_table(results),
        ],
        pictures=pictures(results),
    )


def mean_cost(runs: Sequence[Run]) -> float:
    return sum(item.cost for item in runs) / len(runs)


def _table(
    results: Sequence[Run], kind: str, first: str, settings: Mapping[str, str], title: str, note: str, emphasis: str
) -> Table:
    """A line for each title and its setting: errors per model, exact pairs and cost over all calls."""
    columns = (first, *columns_of(results, kind), "exact pairs", "cost")
    costs = [share(mean_cost(of(results, kind, setting))) for setting in settings.values()]
    rows = tuple((*row, cost) for row, cost in zip(rows_of(results, kind, settings), costs, strict=True))
    return Table(title, columns, rows, note, emphasis)


def comparison_table(results: Sequence[Run], density: float) -> Table:
    settings = {title: at(reconstruction, density) for reconstruction, title in COMPARED.items()}
    title, note = f"Reconstructions at {share(density, 0)}", f"{UNPROBED} {CHARGED}"
    return _table(results, COMPARISON, "reconstruction", settings, title, note, COMPARED["anchored"])


def ingredient_tables(results: Sequence[Run], density: float) -> list[Table]:
    """One table; none after a quick look."""
    settings = {setting: setting for setting in settings_of(results, INGREDIENTS)}
    if not settings:
        return []
    title = f"Ingredients of anchored reconstruction at {share(density, 0)}"
    note = (
        f"{UNPROBED} One thing changed at a time, all within the same cost. More slots than K/V groups, or a "
        "higher rank than the head dim, are cut to that."
    )
    return [_table(results, INGREDIENTS, "setting", settings, title, note, AS_IT_IS)]


def against_simpler(results: Sequence[Run], density: float) -> list[tuple[Run, Run]]:
    """Anchored on each call at one density, and the better of hard drop and the paper's method at the same
    cost."""
    best: dict[tuple[str, str], Run] = {}
    for name in SIMPLER:
        for item in of(results, SAME_COST, at(name, density)):
            key = (item.model, item.call)
            best[key] = min(best.get(key, item), item, key=lambda run: run.mean)
    ours = of(results, COMPARISON, at("anchored", density))
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
    note = f"Mean row error of anchored above {WORSE:g} x that of a simpler method at the same cost, routing included."
    if notes:
        note += f" Their receipts say: {'; '.join(notes)}."
    return [Table("Calls on which anchored is worse", columns, rows, note)]


def at_most(
    results: Sequence[Run], ours: str, theirs: str, claim: str, factor: float = 1.0, p99: bool = False, tokens: int = 0
) -> Finding:
    """Whether, for every model, the mean error of `ours` is at most `factor` times that of `theirs` and its
    p99 not higher; only calls of at least that many tokens."""
    long = [item for item in results if item.tokens >= tokens]
    left, right = of(long, COMPARISON, ours), of(long, COMPARISON, theirs)
    if not left or len(left) != len(right):
        return Finding(claim, None, "no such calls")
    kept = {}
    for model in models_of(left):
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
    return decided(claim, list(kept.values()), evidence)


def _times(value: float, other: float) -> str:
    return f" ({value / other:.2f} x)" if other > 0 else ""


def reconstruction_findings(results: Sequence[Run]) -> list[Finding]:
    ours, paper = {density: at("anchored", density) for density in DENSITIES}, at("probe", 0.22)
    theirs = "the paper's method at 22 %"
    lower = f"Anchored at 22 % has at most 0.4 x the mean error of {theirs}, and no higher p99"
    less = f"Anchored at 14 % has no more mean error than {theirs}"
    long = f"Anchored at 8 % has no more mean error than {theirs}, calls of {LONG:,} tokens or more"
    return [
        at_most(results, ours[0.22], paper, lower, factor=0.4, p99=True),
        at_most(results, ours[0.14], paper, less),
        at_most(results, ours[0.08], paper, long, tokens=LONG),
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


def estimated(
    results: Sequence[Run], reconstruction: str, model: str = ALL, densities: Sequence[float] = DENSITIES
) -> list[tuple[float, float | None]]:
    """True and estimated mean row error of each call and density."""
    settings = {at(reconstruction, density) for density in densities}
    runs = [item for item in results if item.table == COMPARISON and item.setting in settings]
    return [(item.mean, item.estimate) for item in runs if model in (ALL, item.model)]


def estimate_table(results: Sequence[Run]) -> Table:
    rows = []
    for reconstruction in ESTIMATING:
        for densities in (*((density,) for density in DENSITIES), DENSITIES):
            found = Estimates.of(estimated(results, reconstruction, densities=densities))
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


def estimate_findings(results: Sequence[Run]) -> list[Finding]:
    ours, paper = (Estimates.of(estimated(results, reconstruction)) for reconstruction in ESTIMATING)
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


def pictures(results: Sequence[Run]) -> list[Picture]:
    names = {title: reconstruction for reconstruction, title in COMPARED.items()}

    def curve(title: str, model: str, place: int) -> list[tuple[float, float]]:
        runs = [of(results, COMPARISON, at(names[title], density), model) for density in DENSITIES]
        return [(100 * mean_cost(found), average(found)[place]) for found in runs]

    models = models_of(results)
    panels = curves_of(models, names, curve)
    scatter = {
        title: {model: comparable(estimated(results, name, model)) for model in models}
        for name, title in ESTIMATING.items()
    }
    ours = [COMPARED["anchored"]]
    return [
        Picture(
            "reconstructions",
            "Error over cost",
            "Cost of everything but grouping, as the receipts have it, at the targets of the tables; the "
            "routing of hard drop and of the paper's method is in it too.",
            figure.curves(panels, "cost, % of dense attention", "row error", log=True, residua=ours),
        ),
        Picture(
            "estimates",
            "What a call says of its error, and what it is",
            f"A point is one call at one density. Dashed: the same; shaded: within a factor of {FACTOR:g}.",
            figure.estimate_scatter(scatter, FACTOR),
        ),
    ]

"""`residua ablate`: the paper's ablations (section 5.2) on captured calls. In every table all variants evaluate the
same number of routed pairs, the probe rows are the same unless they are what is compared, and errors are those of rows
that no variant has probed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from ...config import Config
from ...types import Probes
from ..capture.captures import CapturedCall
from ..reports import figure
from ..reports.page import Finding, Page, Picture
from ..reports.table import Table, pair, share
from .study import (
    ERRORS,
    Result,
    Watch,
    average,
    by_model,
    columns_of,
    compared,
    curves_of,
    make_page,
    of,
    settings_of,
    some,
    watched,
)
from .subject import Sparse, Subject

DENSITIES = (0.12, 0.17, 0.22, 0.28, 0.35)
QUICK_DENSITIES = (0.12, 0.22, 0.35)
PROBE_COUNTS = (16, 32, 64, 128, 256)
RANKS = (4, 8, 16, 32, 64)
COLD_STEPS = (1, 2, 5, 10, 25)
WARM_STEPS = (1, 2, 4, 8)
RANDOM_DRAWS = 3

PARTITION_TABLE, DENSITY_TABLE, PROBE_TABLE = ("partition and reconstruction", "density", "probes and estimator")
COUNT_TABLE, RANK_TABLE, ITERATION_TABLE = "probe count", "reconstruction rank", "k-means iterations"

SEMANTIC, KEY_RESPONSE = "semantic partition", "key-response K/V partition"
RESPONSE, SEMANTIC_RECONSTRUCTED = "response-coupled partition", "semantic partition + probe reconstruction"
OWN_PROBES = "semantic partition + probe reconstruction, probes of its own"
SPARSEPR = "SparsePR"
RANDOM, UNIFORM, STRATIFIED = ("random probes (mean of 3 draws)", "uniform spatiotemporal probes", "stratified probes")
RIDGE, SUBSPACE = "ridge only", "ridge + probe-residual subspace"


class Ablation:
    """The tables of one call."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.config = subject.config
        self.sizes = subject.sizes(subject.config)
        self.response = subject.sparse(self._config("response"))
        self.probes = subject.probes(self.response.grouping, self.sizes.probes, "stratified")

    def _config(self, partition: str, density: float | None = None) -> Config:
        return self.config.replace(partition=partition, density=density or self.config.density)

    def _result(self, table: str, setting: str, errors: tuple[float, float], sparse: Sparse, probes: int) -> Result:
        captured = self.subject.captured
        used = probes / captured.tokens
        executed, budget = sparse.density + used, sparse.allowed + used
        return Result(table, setting, captured.model, captured.name, *errors, executed, budget=budget)

    def _reconstructed(self, sparse: Sparse, probes: Probes, rank: int | None = None, subspace: bool = True) -> Tensor:
        rank = self.sizes.residual_rank if rank is None else rank
        return self.subject.reconstruction(sparse, probes, rank, self.config.ridge, subspace)

    def partition_and_reconstruction(self) -> Iterator[Result]:
        """Table 2."""
        subject, count = self.subject, self.sizes.probes
        semantic = subject.sparse(self._config("semantic"))
        own = subject.probes(semantic.grouping, count, "stratified")
        variants: dict[str, tuple[Sparse, Probes | None]] = {
            SEMANTIC: (semantic, None),
            KEY_RESPONSE: (subject.sparse(self._config("key-response")), None),
            RESPONSE: (self.response, None),
            SEMANTIC_RECONSTRUCTED: (semantic, self.probes),
            OWN_PROBES: (semantic, own),
            SPARSEPR: (self.response, self.probes),
        }
        for setting, (sparse, probes) in variants.items():
            out = sparse.out if probes is None else self._reconstructed(sparse, probes)
            errors = subject.errors(out, self.probes, own)
            yield self._result(PARTITION_TABLE, setting, errors, sparse, 0 if probes is None else count)

    def density_sweep(self, densities: Sequence[float] = DENSITIES) -> Iterator[Result]:
        """Table 3; the setting is `method @ density`."""
        subject = self.subject
        for density in densities:
            response = self._config("response", density)
            kept = subject.sizes(response).probes
            probes = subject.probes(subject.group(response), kept, "stratified")
            methods = {"semantic": (SEMANTIC, SEMANTIC_RECONSTRUCTED), "response": (RESPONSE, SPARSEPR)}
            for partition, (hard, reconstructed) in methods.items():
                sparse = subject.sparse(self._config(partition, density))
                outs = {hard: (sparse.out, 0), reconstructed: (self._reconstructed(sparse, probes), kept)}
                for method, (out, count) in outs.items():
                    errors = subject.errors(out, probes)
                    yield self._result(DENSITY_TABLE, f"{method} @ {density:g}", errors, sparse, count)

    def probe_design(self) -> Iterator[Result]:
        """Table 4, with the response-coupled partition."""
        subject, count, grouping = self.subject, self.sizes.probes, self.response.grouping
        random = [subject.probes(grouping, count, "random", seed) for seed in range(RANDOM_DRAWS)]
        uniform = self._uniform(count)
        every = (self.probes, uniform, *random)

        def errors(probes: Probes, subspace: bool = True) -> tuple[float, float]:
            return subject.errors(self._reconstructed(self.response, probes, subspace=subspace), *every)

        drawn = [errors(probes) for probes in random]
        stratified = errors(self.probes)
        found = {
            RANDOM: (fmean(mean for mean, _ in drawn), fmean(p99 for _, p99 in drawn)),
            UNIFORM: errors(uniform),
            STRATIFIED: stratified,
            RIDGE: errors(self.probes, subspace=False),
            SUBSPACE: stratified,
        }
        for setting, pair_ in found.items():
            yield self._result(PROBE_TABLE, setting, pair_, self.response, count)

    def _uniform(self, count: int) -> Probes:
        """Evenly spread over frames, height and width; over the sequence if the grid is unknown."""
        subject, grid = self.subject, self.subject.captured.grid
        if grid is None or grid[0] * grid[1] * grid[2] != len(subject.rows):
            return subject.probes(self.response.grouping, count, "uniform")
        rows = subject.rows[lattice(grid, count)][None, None]
        return subject.at(rows, subject.weights(self.response.grouping, rows))

    def probe_budget(self) -> Iterator[Result]:
        """More probes and more directions, on the same route."""
        subject, grouping = self.subject, self.response.grouping
        counts = [count for count in PROBE_COUNTS if count <= len(subject.rows) // 4]
        sets = {count: subject.probes(grouping, count, "stratified") for count in counts}
        for count, probes in sets.items():
            rank = min(self.sizes.residual_rank, count)
            errors = subject.errors(self._reconstructed(self.response, probes, rank), *sets.values())
            yield self._result(COUNT_TABLE, f"{count}", errors, self.response, count)
        for rank in RANKS:
            if rank <= min(subject.call.v.shape[-1], self.sizes.probes):
                errors = subject.errors(self._reconstructed(self.response, self.probes, rank), self.probes)
                yield self._result(RANK_TABLE, f"{rank}", errors, self.response, self.sizes.probes)

    def iterations(self, earlier: tuple[Tensor, Tensor] | None) -> Iterator[Result]:
        """K-means steps from a cold start, and from the centroids of an earlier step of the same layer."""
        subject, base = self.subject, self._config("response")
        changed = {f"cold, {steps}": base.replace(kmeans_cold=steps) for steps in COLD_STEPS}
        if earlier is not None:
            changed |= {f"warm, {steps}": base.replace(kmeans_warm=steps) for steps in WARM_STEPS}
        for setting, config in changed.items():
            start = earlier if setting.startswith("warm") else None
            sparse = subject.sparse(base, subject.group(config, start))
            errors = subject.errors(self._reconstructed(sparse, self.probes), self.probes)
            yield self._result(ITERATION_TABLE, setting, errors, sparse, self.sizes.probes)

    @property
    def centroids(self) -> tuple[Tensor, Tensor]:
        """What the next step of this layer can start from."""
        grouping = self.response.grouping
        return grouping.query_centroids, grouping.kv_centroids[..., : self.sizes.kv_groups, :]


def lattice(grid: tuple[int, int, int], count: int) -> Tensor:
    """`count` tokens spread evenly over a grid, in its raster order; if no lattice has that many points,
    evenly spaced tokens are added.  # [count] int64"""
    frames, height, width = grid
    best, best_score = (1, 1, 1), (0, 0.0)
    for a in range(1, min(frames, count) + 1):
        for b in range(1, min(height, count // a) + 1):
            c = min(width, count // (a * b))
            gaps = torch.tensor([frames / a, height / b, width / c])
            score = (a * b * c, -float(gaps.log().var()))
            if score > best_score:
                best, best_score = (a, b, c), score
    t, y, x = (
        (torch.arange(n) * 2 + 1) * side // (2 * n) for n, side in zip(best, grid, strict=True)
    )  # centres of equal cells
    rows = ((t[:, None, None] * height + y[:, None]) * width + x).flatten()
    rest = torch.ones(frames * height * width, dtype=torch.bool)
    rest[rows] = False
    others = rest.nonzero()[:, 0]
    missing = min(count - len(rows), len(others))
    fill = others[torch.arange(missing) * len(others) // max(1, missing)]
    return torch.cat([rows, fill]).sort().values


def in_order(calls: Sequence[CapturedCall]) -> list[CapturedCall]:
    """Sorted so that the calls of a layer are together, in the order of their steps."""
    return sorted(calls, key=lambda call: (*series(call), call.step or 0))


def series(call: CapturedCall) -> tuple[str, str, int, str]:
    return call.model, str(call.layer), call.head, call.branch


@torch.no_grad()
def measure(
    calls: Sequence[CapturedCall], config: Config, quick: bool = False, watch: Watch | None = None
) -> list[Result]:
    """Every table on every call, one call in memory at a time."""
    ordered = in_order(calls)
    several_steps = max(Counter(map(series, ordered)).values()) > 1
    results: list[Result] = []
    centroids: dict[object, tuple[Tensor, Tensor]] = {}  # of the last call of each layer
    for captured in watched(ordered, watch):
        ablation = Ablation(Subject(captured, config))
        results += ablation.partition_and_reconstruction()
        results += ablation.density_sweep(QUICK_DENSITIES if quick else DENSITIES)
        results += ablation.probe_design()
        if not quick:
            results += ablation.probe_budget()
            earlier = centroids.get(series(captured))
            if earlier is not None or not several_steps:
                results += ablation.iterations(earlier)
            centroids[series(captured)] = ablation.centroids
    return results


def ablate(
    calls: Sequence[CapturedCall], config: Config, command: str, quick: bool = False, watch: Watch | None = None
) -> Page:
    chosen = some(calls, quick)
    results = measure(chosen, config, quick, watch)
    return make_page(
        chosen,
        calls,
        config,
        results,
        ablation_findings(results),
        title="Ablations of SparsePR on captured attention",
        lead="Partition and reconstruction apart and together, at several densities; which rows are probed, "
        "how many, and what is fitted to them.",
        command=command,
        tables=ablation_tables(results),
        pictures=pictures(results, config.density),
        warnings=unmatched(results),
    )


def unmatched(results: Sequence[Result]) -> list[str]:
    """A warning if compared variants did not evaluate the same number of pairs."""
    over = [item for item in results if item.over > 0]
    if not over:
        return []
    calls = {(item.model, item.call) for item in results}
    broken = {(item.model, item.call) for item in over}
    worst = max(over, key=lambda item: item.over)
    return [
        f"The budget is not matched in {len(broken)} of {len(calls)} calls: every query group keeps at least "
        f"one cell, more than the target there allows (worst: {worst.setting}, {worst.model} {worst.call}: "
        f"{share(worst.density)} of the pairs instead of {share(worst.budget or 0.0)}). Fewer query groups, "
        "a higher density or longer calls match it."
    ]


def density_settings(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """Methods and densities of the settings of Table 3."""
    parts = [setting.split(" @ ") for setting in settings_of(results, DENSITY_TABLE)]
    return list(dict.fromkeys(method for method, _ in parts)), list(dict.fromkeys(density for _, density in parts))


def pictures(results: Sequence[Result], density: float) -> list[Picture]:
    def error(table: str, setting: str, model: str, place: int) -> float:
        return average(of(results, table, setting, model))[place]

    def bars(place: int) -> dict[str, dict[str, float]]:
        settings = (SEMANTIC, KEY_RESPONSE, RESPONSE, SEMANTIC_RECONSTRUCTED, SPARSEPR)
        return {m: {setting: error(PARTITION_TABLE, setting, m, place) for setting in settings} for m in models}

    def curve(method: str, model: str, place: int) -> list[tuple[float, float]]:
        return [(100 * float(d), error(DENSITY_TABLE, f"{method} @ {d}", model, place)) for d in densities]

    models, (methods, densities) = columns_of(results), density_settings(results)
    groups = {f"{kind} of the row error": bars(place) for place, kind in enumerate(ERRORS)}
    panels = curves_of(models, methods, curve)
    by_partition = figure.bars(groups, "row error", SPARSEPR)
    by_density = figure.curves(panels, "executed pairs, %", "row error", marker_at=100 * density, residua=[SPARSEPR])
    same = "Row error, unprobed rows, same routed pairs."
    both = "Executed pairs include probe rows. The dashed line is the density of the other tables."
    return [
        Picture("partition", "Partition and reconstruction", same, by_partition),
        Picture("density", "Error over density", both, by_density),
    ]


def density_tables(results: Sequence[Result]) -> list[Table]:
    """Table 3, one per model."""
    methods, densities = density_settings(results)
    columns = ("method", *(share(float(density), 0) for density in densities))
    note = "Mean / p99. Hard drop leaves the probes' share of the pairs unused, so that routes are matched."

    def row(method: str, model: str) -> tuple[str, ...]:
        found = [average(of(results, DENSITY_TABLE, f"{method} @ {d}", model)) for d in densities]
        return method, *(pair(mean, p99) for mean, p99, _ in found)

    title = "Density of executed pairs (Table 3)"
    return [
        Table(f"{title}: {model}", columns, tuple(row(method, model) for method in methods), note, SPARSEPR)
        for model in columns_of(results)
    ]


def ablation_tables(results: Sequence[Result]) -> list[Table]:
    unprobed = "Mean / p99 of the relative row error, rows that no variant probed, averaged over calls."
    own = "probe rows and weights are those of the response-coupled groups except where a row says otherwise."
    steps = (
        f"{unprobed} SparsePR; a warm start takes the centroids of the captured step before. Where steps "
        "were captured, only calls with such a step are counted."
    )
    partition, probes = "Partition and reconstruction (Table 2)", "Probe selection and estimator (Table 4)"
    same_route = f"{unprobed} Same route"
    same_pairs = f"{unprobed} Same routed pairs everywhere; {own}"
    tables = [
        by_model(results, PARTITION_TABLE, partition, "configuration", same_pairs, SPARSEPR),
        *density_tables(results),
        by_model(results, PROBE_TABLE, probes, "configuration", f"{unprobed} Response-coupled partition, same route."),
        by_model(results, COUNT_TABLE, "Probe rows", "probes", f"{same_route}."),
        by_model(results, RANK_TABLE, "Directions of the fit", "rank", f"{same_route} and probes."),
        by_model(results, ITERATION_TABLE, "K-means steps", "start, steps", steps),
    ]
    return [table for table in tables if table.rows]


def ablation_findings(results: Sequence[Result]) -> list[Finding]:
    """Whether the paper's orderings are confirmed or contradicted."""
    return [
        compared(results, PARTITION_TABLE, RESPONSE, SEMANTIC, "Response-coupled groups lower the hard-drop error"),
        compared(results, PARTITION_TABLE, SPARSEPR, SEMANTIC_RECONSTRUCTED, "They also help a reconstruction"),
        _larger_gain(results),
        compared(results, PROBE_TABLE, STRATIFIED, RANDOM, "Stratified probes beat random ones"),
        compared(results, PROBE_TABLE, STRATIFIED, UNIFORM, "Stratified probes beat evenly spaced ones"),
        compared(results, PROBE_TABLE, SUBSPACE, RIDGE, "The residual subspace is a small gain over ridge alone"),
        _everywhere(results),
    ]


def _larger_gain(results: Sequence[Result]) -> Finding:
    claim = "Probe reconstruction is the larger gain of the two"
    hard = of(results, PARTITION_TABLE, SEMANTIC)
    if not hard:
        return Finding(claim, None, "no such calls")
    start = average(hard)[0]
    partition = start - average(of(results, PARTITION_TABLE, RESPONSE))[0]
    reconstruction = start - average(of(results, PARTITION_TABLE, SEMANTIC_RECONSTRUCTED))[0]
    evidence = (
        f"mean error {start:.4f}: partition alone lowers it by {partition:.4f}, reconstruction by {reconstruction:.4f}"
    )
    return Finding(claim, reconstruction > partition, evidence)


def _everywhere(results: Sequence[Result]) -> Finding:
    claim = "SparsePR has the lowest mean error at every density"
    methods, densities = density_settings(results)
    if not densities:
        return Finding(claim, None, "no such calls")
    best = {}
    for density in densities:
        means = {method: average(of(results, DENSITY_TABLE, f"{method} @ {density}"))[0] for method in methods}
        best[density] = min(means, key=means.__getitem__)
    evidence = "; ".join(f"{share(float(density), 0)}: {method}" for density, method in best.items())
    return Finding(claim, set(best.values()) == {SPARSEPR}, f"lowest at {evidence}")

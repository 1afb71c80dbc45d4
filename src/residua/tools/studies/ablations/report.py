"""`residua ablate`: the paper's ablation tables over a whole capture, as one report."""

from __future__ import annotations

from collections.abc import Sequence

from ....config import Config
from ...capture.captures import CapturedCall
from ...reports import figure
from ...reports.page import Finding, Page, Picture
from ...reports.table import Table, pair, share
from ..common import Watch, facts, few, weighed
from ..results import Result, average, by_model, compared, models_of, of, settings_of
from . import measure as ab
from .measure import measure


def ablate(
    calls: Sequence[CapturedCall], config: Config, command: str, quick: bool = False, watch: Watch | None = None
) -> Page:
    chosen = few(calls) if quick else list(calls)
    results = measure(chosen, config, quick, watch)
    return Page(
        title="Ablations of SparsePR on captured attention",
        lead="Partition and reconstruction apart and together, at several densities; which rows are probed, "
        "how many, and what is fitted to them.",
        command=command,
        tables=ablation_tables(results),
        pictures=pictures(results, config.density),
        warnings=unmatched(results),
        findings=weighed(ablation_findings(results), chosen),
        facts=facts(chosen, calls, config),
        data={"results": [vars(item) for item in results], "config": config.to_dict()},
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


def pictures(results: Sequence[Result], density: float) -> list[Picture]:
    models = models_of(results)
    settings = [ab.SEMANTIC, ab.KEY_RESPONSE, ab.RESPONSE, ab.SEMANTIC_RECONSTRUCTED, ab.SPARSEPR]
    kinds = {"mean": 0, "p99": 1}
    groups = {
        f"{kind} of the row error": {
            model: {name: average(of(results, ab.PARTITION_TABLE, name, model))[place] for name in settings}
            for model in models
        }
        for kind, place in kinds.items()
    }
    sweep = settings_of(results, ab.DENSITY_TABLE)
    methods = list(dict.fromkeys(setting.split(" @ ")[0] for setting in sweep))
    shares = list(dict.fromkeys(setting.split(" @ ")[1] for setting in sweep))
    panels = {
        f"{model}: {name}": {
            method: [
                (100 * float(s), average(of(results, ab.DENSITY_TABLE, f"{method} @ {s}", model))[place])
                for s in shares
            ]
            for method in methods
        }
        for model in models
        for name, place in kinds.items()
    }
    return [
        Picture(
            "partition",
            "Partition and reconstruction",
            "Row error, unprobed rows, same routed pairs.",
            figure.bars(groups, "row error", ab.SPARSEPR),
        ),
        Picture(
            "density",
            "Error over density",
            "Executed pairs include probe rows. The dashed line is the density of the other tables.",
            figure.curves(panels, "executed pairs, %", "row error", marker_at=100 * density, residua=[ab.SPARSEPR]),
        ),
    ]


def density_tables(results: Sequence[Result]) -> list[Table]:
    """Table 3, one per model."""
    settings = settings_of(results, ab.DENSITY_TABLE)
    methods = list(dict.fromkeys(setting.split(" @ ")[0] for setting in settings))
    densities = list(dict.fromkeys(setting.split(" @ ")[1] for setting in settings))
    tables = []
    for model in models_of(results):
        rows = []
        for method in methods:
            found = [average(of(results, ab.DENSITY_TABLE, f"{method} @ {d}", model)) for d in densities]
            rows.append((method, *(pair(mean, p99) for mean, p99, _ in found)))
        columns = ("method", *(share(float(density), 0) for density in densities))
        note = "Mean / p99. Hard drop leaves the probes' share of the pairs unused, so that routes are matched."
        title = f"Density of executed pairs (Table 3): {model}"
        tables.append(Table(title, columns, tuple(rows), note, ab.SPARSEPR))
    return tables


def ablation_tables(results: Sequence[Result]) -> list[Table]:
    unprobed = "Mean / p99 of the relative row error, rows that no variant probed, averaged over calls."
    tables = [
        by_model(
            results,
            ab.PARTITION_TABLE,
            "Partition and reconstruction (Table 2)",
            "configuration",
            f"{unprobed} Same routed pairs everywhere; probe rows and weights are those of the "
            "response-coupled groups except where a row says otherwise.",
            ab.SPARSEPR,
        ),
        *density_tables(results),
        by_model(
            results,
            ab.PROBE_TABLE,
            "Probe selection and estimator (Table 4)",
            "configuration",
            f"{unprobed} Response-coupled partition, same route.",
        ),
        by_model(results, ab.COUNT_TABLE, "Probe rows", "probes", f"{unprobed} Same route."),
        by_model(results, ab.RANK_TABLE, "Directions of the fit", "rank", f"{unprobed} Same route and probes."),
        by_model(
            results,
            ab.ITERATION_TABLE,
            "K-means steps",
            "start, steps",
            f"{unprobed} SparsePR; a warm start takes the centroids of the captured step before. Where steps "
            "were captured, only calls with such a step are counted.",
        ),
    ]
    return [table for table in tables if table.rows]


def ablation_findings(results: Sequence[Result]) -> list[Finding]:
    """Whether the paper's orderings are confirmed or contradicted."""
    first = ab.PARTITION_TABLE
    found = [
        compared(results, first, ab.RESPONSE, ab.SEMANTIC, "Response-coupled groups lower the hard-drop error"),
        compared(results, first, ab.SPARSEPR, ab.SEMANTIC_RECONSTRUCTED, "They also help a reconstruction"),
        _larger_gain(results),
        compared(results, ab.PROBE_TABLE, ab.STRATIFIED, ab.RANDOM, "Stratified probes beat random ones"),
        compared(results, ab.PROBE_TABLE, ab.STRATIFIED, ab.UNIFORM, "Stratified probes beat evenly spaced ones"),
        compared(
            results, ab.PROBE_TABLE, ab.SUBSPACE, ab.RIDGE, "The residual subspace is a small gain over ridge alone"
        ),
        _everywhere(results),
    ]
    return found


def _larger_gain(results: Sequence[Result]) -> Finding:
    claim = "Probe reconstruction is the larger gain of the two"
    hard = of(results, ab.PARTITION_TABLE, ab.SEMANTIC)
    if not hard:
        return Finding(claim, None, "no such calls")
    start = average(hard)[0]
    partition = start - average(of(results, ab.PARTITION_TABLE, ab.RESPONSE))[0]
    reconstruction = start - average(of(results, ab.PARTITION_TABLE, ab.SEMANTIC_RECONSTRUCTED))[0]
    evidence = (
        f"mean error {start:.4f}: partition alone takes off {partition:.4f}, reconstruction alone {reconstruction:.4f}"
    )
    return Finding(claim, reconstruction > partition, evidence)


def _everywhere(results: Sequence[Result]) -> Finding:
    claim = "SparsePR has the lowest mean error at every density"
    settings = settings_of(results, ab.DENSITY_TABLE)
    densities = list(dict.fromkeys(setting.split(" @ ")[1] for setting in settings))
    methods = list(dict.fromkeys(setting.split(" @ ")[0] for setting in settings))
    best = []
    for density in densities:
        means = {m: average(of(results, ab.DENSITY_TABLE, f"{m} @ {density}"))[0] for m in methods}
        best.append(min(means, key=means.__getitem__))
    if not best:
        return Finding(claim, None, "no such calls")
    evidence = "; ".join(f"{share(float(d), 0)}: {b}" for d, b in zip(densities, best, strict=True))
    return Finding(claim, set(best) == {ab.SPARSEPR}, f"lowest at {evidence}")

"""Results of many calls as the paper's tables: averages per model, and what they say about its claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from . import ablations as ab
from .ablations import Result
from .report import Finding
from .tables import Table, pair, share

ALL = "all calls"


def models_of(results: Iterable[Result]) -> list[str]:
    """Model names in order, and `all calls` where there are several."""
    found = list(dict.fromkeys(result.model for result in results))
    return [*found, ALL] if len(found) > 1 else found


def of(results: Sequence[Result], table: str, setting: str, model: str = ALL) -> list[Result]:
    return [
        item
        for item in results
        if item.table == table and item.setting == setting and model in (ALL, item.model)
    ]


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
    """A row per setting: mean / p99 for every model, and the density that was executed."""
    models = models_of(item for item in results if item.table == table)
    rows = []
    for setting in settings_of(results, table):
        found = [of(results, table, setting, model) for model in models]
        cells = [pair(*average(calls)[:2]) if calls else "-" for calls in found]
        rows.append((setting, *cells, share(average(of(results, table, setting))[2])))
    return Table(title, (first, *models, "executed pairs"), tuple(rows), note, emphasis)


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
        note = (
            "Mean / p99. Hard drop leaves the probes' share of the pairs unused, so that routes are matched."
        )
        title = f"Density of executed pairs (Table 3): {model}"
        tables.append(Table(title, columns, tuple(rows), note, ab.SPARSEPR))
    return tables


def ablation_tables(results: Sequence[Result]) -> list[Table]:
    unprobed = "Mean / p99 of the relative row error, rows that no variant probed, averaged over calls."
    tables = [
        by_model(
            results, ab.PARTITION_TABLE, "Partition and reconstruction (Table 2)", "configuration",
            f"{unprobed} Same routed pairs everywhere; probe rows and weights are those of the "
            "response-coupled groups except where a row says otherwise.", ab.SPARSEPR,
        ),
        *density_tables(results),
        by_model(
            results, ab.PROBE_TABLE, "Probe selection and estimator (Table 4)", "configuration",
            f"{unprobed} Response-coupled partition, same route.",
        ),
        by_model(results, ab.COUNT_TABLE, "Probe rows", "probes", f"{unprobed} Same route."),
        by_model(
            results, ab.RANK_TABLE, "Directions of the fit", "rank", f"{unprobed} Same route and probes."
        ),
        by_model(
            results, ab.ITERATION_TABLE, "K-means steps", "start, steps",
            f"{unprobed} SparsePR; a warm start takes the centroids of the captured step before. Where steps "
            "were captured, only calls with such a step are counted.",
        ),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


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


def ablation_findings(results: Sequence[Result]) -> list[Finding]:
    """The paper's orderings, confirmed or contradicted."""
    first = ab.PARTITION_TABLE
    found = [
        compared(
            results, first, ab.RESPONSE, ab.SEMANTIC, "Response-coupled groups lower the hard-drop error"
        ),
        compared(results, first, ab.SPARSEPR, ab.SEMANTIC_RECONSTRUCTED, "They also help a reconstruction"),
        _larger_gain(results),
        compared(results, ab.PROBE_TABLE, ab.STRATIFIED, ab.RANDOM, "Stratified probes beat random ones"),
        compared(
            results, ab.PROBE_TABLE, ab.STRATIFIED, ab.UNIFORM, "Stratified probes beat evenly spaced ones"
        ),
        compared(
            results, ab.PROBE_TABLE, ab.SUBSPACE, ab.RIDGE,
            "The residual subspace is a small gain over ridge alone",
        ),
        _everywhere(results),
    ]  # fmt: skip
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
        f"mean error {start:.4f}: partition alone takes off {partition:.4f}, "
        f"reconstruction alone {reconstruction:.4f}"
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

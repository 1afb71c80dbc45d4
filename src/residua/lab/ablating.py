"""`residua ablate`: the paper's ablation tables over a whole capture, as one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import Config
from . import ablations as ab
from . import figures
from .ablations import Ablation, Result, in_order, site
from .analysis import Watch, facts, few
from .captures import CapturedCall
from .report import Picture, Report
from .study import Study
from .summary import ablation_findings, ablation_tables, average, models_of, of, settings_of

QUICK_DENSITIES = (0.12, 0.22, 0.35)


@torch.no_grad()
def measure(
    calls: Sequence[CapturedCall], config: Config, quick: bool = False, watch: Watch | None = None
) -> list[Result]:
    """Every table on every call, one call in memory at a time."""
    ordered = in_order(calls)
    several_steps = max(Counter(map(site, ordered)).values()) > 1
    results: list[Result] = []
    centroids: dict[object, tuple[Tensor, Tensor]] = {}  # of the last call of each site
    for place, captured in enumerate(ordered):
        if watch is not None:
            watch(place, len(ordered), f"{captured.model} {captured.name}")
        ablation = Ablation(Study(captured, config))
        results += ablation.partition_and_reconstruction()
        results += ablation.density_sweep(QUICK_DENSITIES if quick else ab.DENSITIES)
        results += ablation.probe_design()
        if not quick:
            results += ablation.probe_budget()
            earlier = centroids.get(site(captured))
            if earlier is not None or not several_steps:
                results += ablation.iterations(earlier)
            centroids[site(captured)] = ablation.centroids
    if watch is not None:
        watch(len(ordered), len(ordered), "done")
    return results


def ablate(
    calls: Sequence[CapturedCall],
    config: Config,
    command: str,
    quick: bool = False,
    watch: Watch | None = None,
) -> Report:
    chosen = few(calls) if quick else list(calls)
    results = measure(chosen, config, quick, watch)
    return Report(
        title="Ablations of SparsePR on captured attention",
        lead="Partition and reconstruction apart and together, at several densities; which rows are probed, "
        "how many, and what is fitted to them.",
        command=command,
        tables=ablation_tables(results),
        pictures=pictures(results, config.density),
        findings=ablation_findings(results),
        facts=facts(chosen, calls, config),
        data={"results": [vars(item) for item in results], "config": config.to_dict()},
    )


def pictures(results: Sequence[Result], density: float) -> list[Picture]:
    models = models_of(results)
    settings = [ab.SEMANTIC, ab.KEY_RESPONSE, ab.RESPONSE, ab.SEMANTIC_RECONSTRUCTED, ab.SPARSEPR]
    groups = {
        model: {name: average(of(results, ab.PARTITION_TABLE, name, model))[0] for name in settings}
        for model in models
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
        for model in models[:2]
        for place, name in enumerate(("mean", "p99"))
    }
    return [
        Picture(
            "partition", "Partition and reconstruction", "Mean row error, unprobed rows, same routed pairs.",
            figures.bars(groups, "mean row error"),
        ),
        Picture(
            "density", "Error over density",
            "Executed pairs include probe rows. The dashed line is the density of the other tables.",
            figures.curves(panels, "executed pairs, %", "row error", marker_at=100 * density),
        ),
    ]  # fmt: skip

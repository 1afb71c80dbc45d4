"""`residua analyze`: the observations of section 3 over a whole capture, as tables, figures and verdicts on
the paper's claims."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import torch

from ....config import Config
from ...capture.captures import CapturedCall
from ...reports import figure
from ...reports.page import Finding, Page, Picture
from ...reports.table import Table, share
from ..common import Watch, facts, few, watched, weighed
from .measure import MASS, MEMBERS, PARTITIONS, Fidelity, Observed, observe

DENSITIES = (0.12, 0.22, 0.35)
MARGIN = 0.005  # a smaller effect, or one that most calls do not show, decides nothing
ALIKE = 0.1  # routes are compared if their omitted masses differ by less than this share


def analyze(
    calls: Sequence[CapturedCall], config: Config, command: str, quick: bool = False, watch: Watch | None = None
) -> Page:
    """Observes every call (a few with `quick`) and writes the report."""
    chosen = few(calls) if quick else list(calls)
    densities = tuple(sorted({config.density} if quick else {*DENSITIES, config.density}))
    groups = 16 if quick else 64
    found = [observe(captured, config, densities, groups) for captured in watched(chosen, watch)]
    return Page(
        title="Structure of captured attention",
        lead="How many keys a row needs and how many a shared route needs, what the kept mass says about the "
        "error, and how much of the missing part an affine map can restore.",
        command=command,
        tables=[support_table(found), fidelity_table(found), affine_table(found), call_table(found)],
        pictures=pictures(found),
        findings=weighed(findings(found), chosen),
        facts=facts(chosen, calls, config),
        data={"calls": [item.to_dict() for item in found], "config": config.to_dict()},
    )


def per_model(found: Sequence[Observed]) -> dict[str, list[Observed]]:
    models: dict[str, list[Observed]] = defaultdict(list)
    for item in found:
        models[item.captured.model].append(item)
    return dict(models)


def support_table(found: Sequence[Observed]) -> Table:
    rows = []
    for model, items in per_model(found).items():
        for name in PARTITIONS:
            row, pooled = (
                torch.cat([getattr(item.supports[name], which) for item in items]).nanmedian().item()
                for which in ("rows", "pooled")
            )
            rows.append((f"{model}, {name} groups", share(row), share(pooled), f"{pooled / row:.2f}"))
    return Table(
        f"O1: keys that hold {MASS:.0%} of the mass, share of all keys (median)",
        ("model, groups", "one row", f"{MEMBERS} rows of a group", "expansion"),
        tuple(rows),
        f"{MEMBERS} evenly spaced rows of each sampled query group; pooled is the union of their keys.",
    )


def fidelity_table(found: Sequence[Observed]) -> Table:
    cells: dict[tuple[str, str, float], list[Fidelity]] = defaultdict(list)
    for item in found:
        for one in item.fidelities:
            cells[item.captured.model, one.partition, one.target].append(one)
    rows = tuple(
        (
            f"{model}, {partition} groups",
            share(target, 0),
            share(fmean(one.density for one in ones)),
            share(fmean(one.retained for one in ones)),
            f"{fmean(one.mean for one in ones):.4f}",
            f"{fmean(one.p99 for one in ones):.4f}",
            f"{max(one.identity for one in ones):.1e}",
        )
        for (model, partition, target), ones in cells.items()
    )
    return Table(
        "O2: kept mass and error of hard drop",
        ("model, groups", "target", "routed pairs", "kept mass", "mean error", "p99 error", "identity, worst gap"),
        rows,
        "The last column checks R = p_U (O_U - O_sp) in fp64 against the operator's fp32 outputs, relative "
        "to the row's dense output.",
    )


def affine_table(found: Sequence[Observed]) -> Table:
    rows = []
    for model, items in per_model(found).items():
        explained = {name: fmean(item.affines[name].explained for item in items) for name in PARTITIONS}
        ratios = [item.affines["response"].orthogonal / item.affines["semantic"].orthogonal for item in items]
        rows.append(
            (
                model,
                share(explained["semantic"]),
                share(explained["response"]),
                f"{100 * (explained['response'] - explained['semantic']):+.1f}",
                f"{median(ratios):.3f}",
                f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}",
            )
        )
    return Table(
        "O3: the residual as an affine function of the sparse output (oracle)",
        (
            "model",
            "explained, semantic",
            "explained, response",
            "points",
            "orthogonal energy, response / semantic (median)",
            "calls below 1",
        ),
        tuple(rows),
        "Same group counts, routing rule and routed pairs for both partitions; fractions: means over calls.",
    )


def call_table(found: Sequence[Observed]) -> Table:
    rows = []
    for item in found:
        semantic, response = (item.affines[name] for name in PARTITIONS)
        support_ = item.supports["semantic"]
        rows.append(
            (
                f"{item.captured.model} {item.captured.name}",
                share(support_.row_median),
                share(support_.pooled_median),
                share(item.supports["response"].pooled_median),
                share(semantic.explained),
                share(response.explained),
                f"{response.orthogonal / semantic.orthogonal:.3f}",
            )
        )
    columns = ("call", "row", "pooled, semantic", "pooled, response", "affine, semantic", "affine, response")
    return Table("Call by call", (*columns, "orthogonal ratio"), tuple(rows))


def pictures(found: Sequence[Observed]) -> list[Picture]:
    models = per_model(found)
    points = {
        name: {
            model: [
                (row, pooled)
                for item in items
                for row, pooled in zip(
                    item.supports[name].rowwise.tolist(), item.supports[name].pooled.tolist(), strict=True
                )
                if row == row
            ]
            for model, items in models.items()
        }
        for name in PARTITIONS
    }
    drawn = []
    if all(pairs for of_model in points.values() for pairs in of_model.values()):
        drawn.append(
            Picture(
                "support",
                "Support of rows and of groups of rows",
                f"A point is a query group: the median share of keys that one of its rows needs for "
                f"{MASS:.0%} of its mass, and the share that {MEMBERS} of its rows need together. On the "
                "dashed line all rows need the same keys.",
                figure.support_scatter(points),
            )
        )
    errors = {
        model: [(1 - one.retained, one.p99) for item in items for one in item.fidelities if one.partition == "semantic"]
        for model, items in models.items()
    }
    caption = "A point is a call at one density, semantic groups, hard drop. Equal mass is not equal error."
    drawn.append(Picture("mass", "Skipped mass against p99 error", caption, figure.mass_against_error(errors)))
    return drawn


def findings(found: Sequence[Observed]) -> list[Finding]:
    expansions = [item.supports["semantic"].pooled_median / item.supports["semantic"].row_median for item in found]
    worst = max(one.identity for item in found for one in item.fidelities)
    gap, evidence = _unlike(found)
    return [
        Finding(
            "O1: a shared route needs more keys than its rows",
            median(expansions) > 1.0,
            f"median expansion {median(expansions):.2f}, from {min(expansions):.2f} to {max(expansions):.2f}",
        ),
        Finding("O2: routes that keep the same mass differ in their error", gap, evidence),
        Finding(
            "O2: R = p_U (O_U - O_sp)", worst < 1e-4, f"largest relative gap {worst:.1e}, fp32 outputs", any_length=True
        ),
        *_affine_findings(found),
    ]


def _affine_findings(found: Sequence[Observed]) -> list[Finding]:
    """Decided per model, as in the paper: the mean of fractions, the median of energy ratios."""
    gains, ratios = {}, {}
    for model, items in per_model(found).items():
        pairs = [(item.affines["semantic"], item.affines["response"]) for item in items]
        gains[model] = [after.explained - before.explained for before, after in pairs]
        ratios[model] = [after.orthogonal / before.orthogonal - 1 for before, after in pairs]
    more = [_clearly(values, fmean(values), MARGIN) for values in gains.values()]
    less = [_clearly([-x for x in values], -median(values), MARGIN) for values in ratios.values()]
    points = ", ".join(
        f"{model} {100 * fmean(values):+.1f} points, up in {sum(x > 0 for x in values)} of {len(values)}"
        for model, values in gains.items()
    )
    energies = ", ".join(
        f"{model} x {1 + median(values):.3f}, down in {sum(x < 0 for x in values)} of {len(values)}"
        for model, values in ratios.items()
    )
    return [
        _over_models("O3: response-coupled groups leave a more affine residual", more, points),
        _over_models("O3: and less energy outside the affine space", less, energies),
    ]


def _clearly(values: Sequence[float], middle: float, margin: float) -> bool | None:
    """True if the values are above zero, by a margin on average and in most calls; False if below; None if
    neither."""
    if middle > margin and 2 * sum(value > 0 for value in values) > len(values):
        return True
    if middle < -margin and 2 * sum(value < 0 for value in values) > len(values):
        return False
    return None


def _over_models(claim: str, decided: Sequence[bool | None], evidence: str) -> Finding:
    if all(answer is None for answer in decided):
        return Finding(claim, None, f"{evidence}; within {share(MARGIN)}", instead="no clear difference")
    return Finding(claim, all(decided), evidence, mixed=len(set(decided)) > 1)


def _unlike(found: Sequence[Observed]) -> tuple[bool | None, str]:
    """The largest ratio of p99 errors between two routes that keep about the same mass."""
    points = [one for item in found for one in item.fidelities if one.partition == "semantic"]
    best, pair = 1.0, None
    for one in points:
        for other in points:
            omitted, others = 1 - one.retained, 1 - other.retained
            alike = abs(omitted - others) <= ALIKE * min(omitted, others)
            if alike and one.p99 > best * other.p99 > 0:
                best, pair = one.p99 / other.p99, (one, other)
    if pair is None:
        return None, "no two routes keep about the same mass"
    text = (
        f"p99 {pair[0].p99:.4f} and {pair[1].p99:.4f} at {share(pair[0].retained, 2)} and "
        f"{share(pair[1].retained, 2)} of the mass, {best:.1f} times"
    )
    return best > 1.5, text

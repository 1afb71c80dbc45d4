"""A comparison for the terminal: its result in one line and a small table."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from ..generate.averages import FIGURES
from ..generate.comparison import Comparison
from ..generate.flops import flops_unit
from ..generate.noise_floor import MEANING as NOISE_FLOOR
from ..generate.noise_floor import noise_floor_text
from ..metrics.video_quality import METRICS
from ..reports.table import Table

if TYPE_CHECKING:
    from ...world.physics import Physics

WAITING = 0.1  # share of the time; above it, other programs influence a speed-up as much as this one
LOAD = 1.5  # runnable programs per core in use


def summary(comparison: Comparison) -> Group:
    """The result in one line, the figures, and the reasons for missing values."""
    dense, found, total = comparison.dense, comparison.quality, comparison.report.total
    rows: list[tuple[str, ...]] = []

    def row(name: str, of_dense: str | None, sparse: str | None) -> None:
        if sparse is not None:
            rows.append((name, sparse) if dense is None else (name, of_dense or "", sparse))

    row(
        "whole generation, seconds",
        None if dense is None else f"{dense.timed.median:.1f}",
        f"{comparison.sparse.median:.1f}",
    )
    row("speed-up", None, _number(comparison.speedup, "{:.2f}x"))
    if dense is not None and comparison.cpu_speedup is not None:
        row("processor seconds", f"{dense.timed.cpu_median:.1f}", f"{comparison.sparse.cpu_median:.1f}")
        row("speed-up in processor time", None, f"{comparison.cpu_speedup:.2f}x")
    row("work of attention, everything counted", "100.0%", _number(comparison.cost, "{:.1%}"))
    row("pairs of tokens evaluated exactly", "100.0%", _number(comparison.density, "{:.1%}"))
    if total.dense_calls:
        row("the same with calls that stayed dense", "100.0%", _number(total.density_with_dense, "{:.1%}"))
    row("estimated error of attention", None, _number(total.error, "{:.4f}"))
    if total.dense_heads:
        row("heads dense because of max error", None, f"{total.dense_heads} of {sum(total.chosen.values())}")
    pflops = [comparison.pflops(dense=kind) for kind in (True, False)]
    unit, factor = flops_unit(pflops)
    amounts = [_number(None if value is None else factor * value, "{:.3g}") for value in pflops]
    row(f"{unit} of the transformer", *amounts)
    for metric in METRICS:
        title, form = FIGURES[metric]
        # The dense column shows the noise floor: a second dense video against the first.
        lowest = None if comparison.noise_floor is None else noise_floor_text(comparison.noise_floor, metric, form)
        row(title + (" (dense: the noise floor)" if lowest else ""), lowest, _number(getattr(found, metric), form))
    for line in _physics(comparison):
        row(*line)
    row("backend", None, ", ".join(total.backends) or None)
    # Without a dense video nothing needs an explanation.
    reasons = [] if dense is None else [f"not measured: {name}: {why}" for name, why in found.not_measured.items()]
    if comparison.noise_floor is not None:
        reasons.insert(0, f"the noise floor: {NOISE_FLOOR}")
    heading = Text(f"{comparison.headline} ({comparison.tokens:,} video tokens)", style="bold")
    columns = ("", "sparse") if dense is None else ("", "dense", "sparse")
    table = Table("", columns, tuple(rows)).rich()
    return Group(heading, table, *(Text(reason, style="dim") for reason in reasons))


def _physics(comparison: Comparison) -> list[tuple[str, str | None, str | None]]:
    """Names and values, dense and sparse; empty except for clips of the model in the box."""
    found = comparison.physics
    if found is None:
        return []
    lines: list[tuple[str, str | None, str | None]] = []
    if found.from_dense is not None:
        lines.append(("ball off the dense path, radii", None, _radii(found.from_dense)))
    if found.from_truth is not None:
        dense = _radii(found.dense_from_truth)
        lines.append(("ball off the simulator's path, radii", dense, _radii(found.from_truth)))
    dense_fate, sparse_fate = _fate(found.dense_from_truth), _fate(found.from_truth or found.from_dense)
    names = ("balls lost", "bounces missed")
    return lines + [(name, dense_fate[place], sparse_fate[place]) for place, name in enumerate(names)]


def _radii(physics: Physics | None) -> str | None:
    if physics is None or not math.isfinite(physics.position_error):
        return None
    return f"{physics.position_error:.3f}"


def _fate(physics: Physics | None) -> tuple[str | None, str | None]:
    """How many balls were lost and how many bounces missed."""
    if physics is None:
        return None, None
    return f"{physics.balls_lost} of {physics.balls}", f"{physics.bounces_missed} of {physics.bounces}"


def busy(waiting: float | None, load: float | None, threads: int) -> str | None:
    """A warning if other work had so much of the machine that the times cannot be trusted. `waiting` was
    measured during the runs; the `load` before them is used where the system does not report it."""
    if waiting is not None:
        return f"Other work held up {waiting:.0%} of the time" if waiting > WAITING else None
    cores = min(threads, os.cpu_count() or 1)
    return f"The machine was busy (load {load:.1f})" if load is not None and load > LOAD * cores else None


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)

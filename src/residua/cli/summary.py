"""A comparison as a small table for the terminal."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from rich.table import Table

from ..generation.comparison import Comparison
from ..generation.floor import floor_text
from ..generation.flops import flops_unit
from .app import figures

if TYPE_CHECKING:
    from ..world.physics import Physics

WAITING = 0.1  # share of the time; above it, other programs influence a speed-up as much as this one
METRICS = (
    ("PSNR, dB", "psnr", "{:.2f}"), ("SSIM", "ssim", "{:.4f}"), ("GMSD", "gmsd", "{:.4f}"),
    ("LPIPS", "lpips", "{:.4f}"),
)  # fmt: skip
LOAD = 1.5  # runnable programs per core in use


def summary(comparison: Comparison) -> Table:
    """What was measured, with the reasons for missing values below the table. If nothing was sparse, says so
    first."""
    title = comparison.all_dense or f"{comparison.tokens:,} video tokens"
    dense, found = comparison.dense, comparison.quality
    table = figures(title, "", *(["sparse"] if dense is None else ["dense", "sparse"]))

    def row(name: str, of_dense: str | None, sparse: str | None) -> None:
        if sparse is not None:
            table.add_row(name, *([] if dense is None else [of_dense or ""]), sparse)

    row(
        "whole generation, seconds",
        None if dense is None else f"{dense.timed.median:.1f}",
        f"{comparison.sparse.median:.1f}",
    )
    row("speed-up", None, _number(comparison.speedup, "{:.2f}x"))
    if dense is not None and comparison.cpu_speedup is not None:
        row("processor seconds", f"{dense.timed.cpu_median:.1f}", f"{comparison.sparse.cpu_median:.1f}")
        row("speed-up in processor time", None, f"{comparison.cpu_speedup:.2f}x")
    row("cost of the sparse calls", "100.0%", _number(comparison.cost, "{:.1%}"))
    row("density of the sparse calls", None, _number(comparison.density, "{:.1%}"))
    row("density of all calls", "100.0%", _number(comparison.report.total.density_with_dense, "{:.1%}"))
    row("backend", None, ", ".join(comparison.report.total.backends) or None)
    row("estimated error of attention", None, _number(comparison.report.total.error, "{:.4f}"))
    dense_heads, chosen = comparison.report.total.dense_heads, comparison.report.total.chosen
    if dense_heads:
        row("heads dense because of max error", None, f"{dense_heads} of {sum(chosen.values())}")
    pflops = [comparison.pflops(dense=kind) for kind in (True, False)]
    unit, factor = flops_unit(pflops)
    amounts = [_number(None if value is None else factor * value, "{:.3g}") for value in pflops]
    row(f"{unit} of the transformer", *amounts)
    for title, metric, form in METRICS:
        # The dense column shows the floor: a second dense video against the first.
        lowest = None if comparison.floor is None else floor_text(comparison.floor, metric, form)
        row(title + (" (dense: the floor)" if lowest else ""), lowest, _number(getattr(found, metric), form))
    for line in _physics(comparison):
        row(*line)
    reasons = [f"not measured: {name}: {reason}" for name, reason in found.not_measured.items()]
    if reasons and dense is not None:  # without a dense video nothing needs an explanation
        table.caption, table.caption_justify = "\n".join(reasons), "left"
    return table


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
    sparse = found.from_truth or found.from_dense
    lines.append(("balls lost; bounces missed", _fate(found.dense_from_truth), _fate(sparse)))
    return lines


def _radii(physics: Physics | None) -> str | None:
    if physics is None or not math.isfinite(physics.position_error):
        return None
    return f"{physics.position_error:.3f}"


def _fate(physics: Physics | None) -> str | None:
    if physics is None:
        return None
    lost = physics.lost + physics.torn + physics.merged
    missed = physics.missing_bounces + physics.extra_bounces
    return f"{lost} of {physics.balls}; {missed} of {physics.bounces}"


def busy(waiting: float | None, load: float | None, threads: int) -> str | None:
    """A warning if other work had so much of the machine that the times cannot be trusted. `waiting` was
    measured during the runs; the `load` before them is used where the system does not report it."""
    if waiting is not None:
        return f"Other work held up {waiting:.0%} of the time" if waiting > WAITING else None
    cores = min(threads, os.cpu_count() or 1)
    return f"The machine was busy (load {load:.1f})" if load is not None and load > LOAD * cores else None


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)

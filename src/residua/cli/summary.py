"""A comparison as a small table for the terminal."""

from __future__ import annotations

import os

from rich.table import Table

from ..generation.comparison import Comparison
from .app import figures

WAITING = 0.1  # of the time: more, and a speed-up says as much about other programs as about this one
LOAD = 1.5  # runnable programs per core that we use


def summary(comparison: Comparison) -> Table:
    table = figures(f"{comparison.tokens:,} video tokens", "", "dense", "sparse")
    dense, found = comparison.dense, comparison.quality
    table.add_row(
        "whole generation, seconds",
        "-" if dense is None else f"{dense.timed.median:.1f}",
        f"{comparison.sparse.median:.1f}",
    )
    table.add_row("speed-up", "", _number(comparison.speedup, "{:.2f}x"))
    if dense is not None and comparison.cpu_speedup is not None:
        table.add_row(
            "processor seconds", f"{dense.timed.cpu_median:.1f}", f"{comparison.sparse.cpu_median:.1f}"
        )
        table.add_row("speed-up in processor time", "", f"{comparison.cpu_speedup:.2f}x")
    table.add_row("cost of the sparse calls", "100.0%", _number(comparison.cost, "{:.1%}"))
    table.add_row("density of the sparse calls", "", _number(comparison.density, "{:.1%}"))
    table.add_row(
        "density of all calls", "100.0%", _number(comparison.report.total.density_with_dense, "{:.1%}")
    )
    table.add_row("estimated error of attention", "", _number(comparison.report.total.error, "{:.4f}"))
    dense_heads, chosen = comparison.report.total.dense_heads, comparison.report.total.chosen
    if dense_heads:
        table.add_row("heads dense because of max error", "", f"{dense_heads} of {sum(chosen.values())}")
    table.add_row(
        "PFLOPs of the transformer",
        _number(comparison.pflops(dense=True), "{:.3g}"),
        _number(comparison.pflops(dense=False), "{:.3g}"),
    )
    table.add_row("PSNR, dB", "", _number(found.psnr, "{:.2f}"))
    table.add_row("SSIM", "", _number(found.ssim, "{:.4f}"))
    table.add_row("LPIPS", "", _number(found.lpips, "{:.4f}"))
    reasons = [f"{name}: {reason}" for name, reason in found.not_measured.items()]
    if reasons:
        table.caption, table.caption_justify = "\n".join(reasons), "left"
    return table


def busy(waiting: float | None, load: float | None, threads: int) -> str | None:
    """Whether other work had so much of the machine that times are not to be trusted. `waiting` was measured
    during the runs; the `load` before them stands in where the system does not tell."""
    if waiting is not None:
        return f"Other work held up {waiting:.0%} of the time" if waiting > WAITING else None
    cores = min(threads, os.cpu_count() or 1)
    return f"The machine was busy (load {load:.1f})" if load is not None and load > LOAD * cores else None


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)

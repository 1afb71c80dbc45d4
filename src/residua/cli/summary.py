"""A comparison as a small table for the terminal."""

from __future__ import annotations

from rich.table import Table

from ..generation.comparison import Comparison
from .app import figures


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
    table.add_row("density of the sparse calls", "", _number(comparison.density, "{:.1%}"))
    table.add_row(
        "density of all calls", "100.0%", _number(comparison.report.total.density_with_dense, "{:.1%}")
    )
    table.add_row("estimated error of attention", "", _number(comparison.report.total.error, "{:.4f}"))
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


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)

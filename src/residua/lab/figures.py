"""Figures of the lab, drawn without a display and without touching matplotlib's global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError

INK, GRID = "#1d2230", "#e4e2dd"
COLOURS = ("#3563d9", "#d2593c", "#2c8a6b", "#e0b04a", "#a36bc2", "#5d6b82", "#4cb3a4", "#93a1b5")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def canvas(columns: int = 1, rows: int = 1, width: float = 5.2, height: float = 3.9) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns], in the house style."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("figures need matplotlib; pip install residua[lab]") from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes


def to_png(figure: Any) -> bytes:
    stream = io.BytesIO()
    # no time and no program name: the same numbers give the same file
    figure.savefig(stream, format="png", dpi=130, metadata={"Software": None})
    return stream.getvalue()


def support_scatter(points: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> bytes:
    """Figure (a): partition -> model -> (row-wise, pooled) support of each group of rows."""
    figure, axes = canvas(len(points))
    for axis, (partition, models) in zip(axes[0], points.items(), strict=True):
        axis.plot([1e-4, 1], [1e-4, 1], color=INK, linewidth=0.8, linestyle="--")
        for place, (model, pairs) in enumerate(models.items()):
            colour = COLOURS[place % len(COLOURS)]
            axis.scatter(*zip(*pairs, strict=True), s=9, alpha=0.35, color=colour, label=model, linewidths=0)
        lowest = min(value for pairs in models.values() for pair in pairs for value in pair)
        axis.set(
            xscale="log", yscale="log", xlim=(0.7 * lowest, 1.1), ylim=(0.7 * lowest, 1.1),
            title=f"{partition} groups",
            xlabel="support of a row (share of keys)", ylabel="pooled support of 8 rows",
        )  # fmt: skip
        legend = axis.legend(frameon=False, fontsize=8, loc="upper left")
        for handle in legend.legend_handles:
            handle.set_alpha(1)
    return to_png(figure)


def mass_against_error(points: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """Figure (b): model -> (skipped mass, p99 error) of each call and density."""
    figure, axes = canvas(width=6.4, height=4.2)
    axis = axes[0, 0]
    for place, (model, pairs) in enumerate(points.items()):
        colour, mark = COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]
        axis.scatter(*zip(*pairs, strict=True), s=26, alpha=0.75, color=colour, marker=mark, label=model)
    axis.set(
        xscale="log", yscale="log", ylabel="p99 row error",
        xlabel="attention mass that the route skips (mean over rows)",
    )  # fmt: skip
    axis.legend(frameon=False, fontsize=8)
    return to_png(figure)


def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    xlabel: str,
    ylabel: str,
    marker_at: float | None = None,
    log: bool = False,
) -> bytes:
    """One panel per title, one line per name through its (x, y) points."""
    columns = min(2, len(panels))
    figure, axes = canvas(columns, -(-len(panels) // columns), width=4.9, height=3.4)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for place, (name, pairs) in enumerate(lines.items()):
            colour, mark = COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]
            axis.plot(*zip(*pairs, strict=True), marker=mark, markersize=4.5, color=colour, label=name)
        if marker_at is not None:
            axis.axvline(marker_at, color=INK, linewidth=0.8, linestyle="--")
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if log:
            _log_ticks(axis)
        else:
            axis.set_ylim(bottom=0)
    # below the panels: inside, some line always runs through it
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, fontsize=8, ncols=len(names), loc="outside lower center")
    return to_png(figure)


def _log_ticks(axis: Any) -> None:
    """A log scale with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.yaxis.set_minor_locator(NullLocator())


def bars(groups: Mapping[str, Mapping[str, float]], ylabel: str) -> bytes:
    """One cluster per model, one bar per setting."""
    figure, axes = canvas(width=max(6.4, 3.2 * len(groups)), height=4.0)
    axis = axes[0, 0]
    settings = list(next(iter(groups.values())))
    width = 0.82 / len(settings)
    for place, setting in enumerate(settings):
        spots = [number + (place - (len(settings) - 1) / 2) * width for number in range(len(groups))]
        heights = [found[setting] for found in groups.values()]
        axis.bar(spots, heights, 0.92 * width, label=setting, color=COLOURS[place % len(COLOURS)])
    axis.grid(visible=False, axis="x")
    axis.set_xticks(range(len(groups)), list(groups))
    axis.set_ylabel(ylabel)
    axis.set_ylim(top=1.45 * max(max(found.values()) for found in groups.values()))
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    return to_png(figure)


def estimate_scatter(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], factor: float
) -> bytes:
    """Panel -> model -> (true, estimated) error, with the identity and a band of a factor around it."""
    figure, axes = canvas(len(panels), width=4.6, height=4.2)
    every = [pair for models in panels.values() for pairs in models.values() for pair in pairs]
    seen = [value for pair in every for value in pair if value > 0] or [0.01, 1.0]
    ends = [0.6 * min(seen), 1.6 * max(seen)]
    for axis, (title, models) in zip(axes[0], panels.items(), strict=True):
        axis.plot(ends, ends, color=INK, linewidth=0.8, linestyle="--")
        low, high = ([end * by for end in ends] for by in (1 / factor, factor))
        axis.fill_between(ends, low, high, color=GRID, alpha=0.6)
        for place, (model, pairs) in enumerate(models.items()):
            colour, mark = COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]
            x, y = zip(*pairs, strict=True) if pairs else ((), ())
            axis.scatter(x, y, s=20, alpha=0.7, color=colour, marker=mark, label=model, linewidths=0)
        axis.set(
            xscale="log", yscale="log", xlim=ends, ylim=ends, title=title,
            xlabel="true mean row error", ylabel="estimated by the call",
        )  # fmt: skip
    axes[0, 0].legend(frameon=False, fontsize=8, loc="upper left")
    return to_png(figure)

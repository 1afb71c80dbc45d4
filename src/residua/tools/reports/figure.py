"""Figures, drawn without a display and without changing matplotlib's global state. Each is made twice: as PNG for
files, and as SVG whose text and axes take the colours of the page it is in. Residua and contradicted claims each have a
colour of their own, in charts and on pages."""

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from ...errors import InputError

RESIDUA = "#3563d9"  # blue: the method of this project, in charts and as an emphasised row
RESIDUA_ON_DARK = "#7d9ff5"  # the same on dark paper
CONTRADICTED = "#d2593c"  # red, used for nothing else
CONFIRMED = "#2c8a6b"  # green, used for nothing else
INK, GRID = "#1d2230", "#e4e2dd"  # text and axes; the lines behind them
REFERENCE = "#b9bec9"  # references, which are no methods: dense attention, an oracle
# Everything else, in this order; neighbours differ clearly on light and on dark backgrounds.
OTHERS = ("#8a6bb1", "#d69a2d", "#3aa5a0", "#6b7a90", "#b5577f", "#9c7a4d", "#93a1b5", "#7fa34a")
# Parts of a whole, such as the stages of a call: what is not attention comes first, in greys.
PART_COLOURS = (REFERENCE, "#6b7a90", RESIDUA, *OTHERS[:3], *OTHERS[4:])
DASHES = ("-", "--", ":", "-.")  # of lines that share a colour
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Colours of a drawing -> CSS variables of the page.
PAGE_COLOURS = {INK: "var(--ink)", GRID: "var(--line)", RESIDUA: "var(--blue)"}
MANY_POINTS = 2000  # a scatter with more points is drawn as a bitmap inside the SVG
_FONTS = re.compile(r"(font: [^;\"]*?px) [^;\"]*")
_PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)


def colours(names: list[str], *residua: str) -> dict[str, str]:
    """A colour for each of some names; those in `residua` stand for this project's method and share its
    colour."""
    others = [name for name in names if name not in residua]
    found = {name: OTHERS[place % len(OTHERS)] for place, name in enumerate(others)}
    return {name: found.get(name, RESIDUA) for name in names}


@dataclass(frozen=True)
class Drawing:
    """One figure in both formats."""

    png: bytes
    svg: str  # an element for a page


def canvas(columns: int = 1, rows: int = 1, width: float = 5.2, height: float = 3.9) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns] in the common style."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("figures need matplotlib; pip install residua[lab]") from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(which="both", color=INK, labelcolor=INK)
        for part in (axis.title, axis.xaxis.label, axis.yaxis.label):
            part.set_color(INK)
        for side in ("left", "bottom"):
            axis.spines[side].set_color(INK)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes


def drawn(figure: Any) -> Drawing:
    """The figure as files. No date, no program name, no random ids: the same numbers give the same bytes."""
    from matplotlib import rc_context

    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=130, metadata={"Software": None})
    figure.patch.set_visible(False)
    for axis in figure.axes:
        axis.patch.set_visible(False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "residua"}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(png.getvalue(), _for_page(svg.getvalue()))


def bitmap(png: bytes, width: int, height: int) -> Drawing:
    """A picture of so many pixels as a figure."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    image = f'<image href="{source}" width="{width}" height="{height}"/>'
    return Drawing(png, f'<svg viewBox="0 0 {width} {height}">{image}</svg>')


def _for_page(svg: str) -> str:
    """The SVG without its file header, as wide as its container, in the page's colours and fonts."""
    svg = _PROLOGUE.sub("", svg)
    opening, rest = svg.split(">", 1)
    svg = re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest
    for colour, variable in PAGE_COLOURS.items():
        svg = svg.replace(colour, variable)
    return _FONTS.sub(r"\1 system-ui, sans-serif", svg).strip()


def support_scatter(points: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Drawing:
    """Figure (a): partition -> model -> (row-wise, pooled) support of each group of rows."""
    figure, axes = canvas(len(points))
    for axis, (partition, models) in zip(axes[0], points.items(), strict=True):
        lowest = min(value for pairs in models.values() for pair in pairs for value in pair)
        _identity(axis, (1e-4, 1), (0.7 * lowest, 1.1), f"{partition} groups")
        axis.set(xlabel="support of a row (share of keys)", ylabel="pooled support of 8 rows")
        many = sum(map(len, models.values())) > MANY_POINTS
        for model, colour in colours(list(models)).items():
            x, y = zip(*models[model], strict=True)
            axis.scatter(x, y, s=9, alpha=0.35, color=colour, label=model, linewidths=0, rasterized=many)
        legend = axis.legend(frameon=False, fontsize=8, loc="upper left", labelcolor=INK)
        for handle in legend.legend_handles:
            handle.set_alpha(1)
    return drawn(figure)


def _identity(axis: Any, ends: Sequence[float], limits: Sequence[float], title: str) -> None:
    """Logarithmic axes with the same limits, and the line on which both values are equal."""
    axis.plot(ends, ends, color=INK, linewidth=0.8, linestyle="--")
    axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits, title=title)


def mass_against_error(points: Mapping[str, Sequence[tuple[float, float]]]) -> Drawing:
    """Figure (b): model -> (skipped mass, p99 error) of each call and density."""
    figure, axes = canvas(width=6.4, height=4.2)
    axis = axes[0, 0]
    for (model, colour), mark in zip(colours(list(points)).items(), cycle(MARKS), strict=False):
        x, y = zip(*points[model], strict=True)
        axis.scatter(x, y, s=26, alpha=0.75, color=colour, marker=mark, label=model)
    axis.set(xscale="log", yscale="log")
    axis.set(xlabel="attention mass that the route skips (mean over rows)", ylabel="p99 row error")
    axis.legend(frameon=False, fontsize=8, labelcolor=INK)
    return drawn(figure)


def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    xlabel: str,
    ylabel: str,
    marker_at: float | None = None,
    log: bool = False,
    residua: Sequence[str] = (),
) -> Drawing:
    """One panel per title, one line per name through its (x, y) points; `residua` names our lines, which
    have one colour and differ in their dashes."""
    columns = min(2, len(panels))
    figure, axes = canvas(columns, -(-len(panels) // columns), width=4.9, height=3.4)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        chosen = colours(list(lines), *residua)
        dashes = dict(zip(residua, cycle(DASHES), strict=False))
        for (name, pairs), mark in zip(lines.items(), cycle(MARKS), strict=False):
            x, y = zip(*pairs, strict=True)
            style = dashes.get(name, DASHES[0])
            axis.plot(x, y, style, marker=mark, markersize=4.5, color=chosen[name], label=name)
        if marker_at is not None:
            axis.axvline(marker_at, color=INK, linewidth=0.8, linestyle="--")
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if all(float(x).is_integer() for pairs in lines.values() for x, _ in pairs):
            axis.xaxis.get_major_locator().set_params(integer=True)
        (_log_ticks if log else _from_zero)(axis)
    # below the panels: inside them it would cover lines
    _legend_below(figure, axes[0, 0], min(4, len(axes[0, 0].get_legend_handles_labels()[1])))
    return drawn(figure)


def _legend_below(figure: Any, axis: Any, columns: int) -> None:
    style = {"frameon": False, "fontsize": 8, "loc": "outside lower center", "labelcolor": INK}
    figure.legend(*axis.get_legend_handles_labels(), ncols=columns, **style)


def _from_zero(axis: Any) -> None:
    """From 0, with room above the highest point: what matplotlib leaves for a flat line would cut it."""
    top = axis.dataLim.ymax
    axis.set_ylim(0, 1.06 * top if 0 < top < math.inf else None)


def _log_ticks(axis: Any) -> None:
    """A log scale with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.yaxis.set_minor_locator(NullLocator())


def bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], ylabel: str, residua: str) -> Drawing:
    """One panel per title: a cluster per model, a bar per setting; `residua` names our bar."""
    groups = next(iter(panels.values()))
    figure, axes = canvas(len(panels), width=max(4.9, 1.8 * len(groups)), height=3.6)
    for axis, (title, found) in zip(axes[0], panels.items(), strict=True):
        settings = list(next(iter(found.values())))
        width, chosen = 0.82 / len(settings), colours(settings, residua)
        for place, setting in enumerate(settings):
            spots = [number + (place - (len(settings) - 1) / 2) * width for number in range(len(found))]
            heights = [values[setting] for values in found.values()]
            axis.bar(spots, heights, 0.92 * width, label=setting, color=chosen[setting])
        axis.grid(visible=False, axis="x")
        axis.set_xticks(range(len(found)), list(found))
        axis.set(title=title, ylabel=ylabel)
    _legend_below(figure, axes[0, 0], 2)
    return drawn(figure)


def ranked(
    panels: Mapping[str, Sequence[tuple[str, float, str]]], xlabel: str, residua: str, references: Sequence[str] = ()
) -> Drawing:
    """One panel per title: (name, value, remark) as bars, the smallest at the top. `residua` names our bar,
    `references` those that are not methods, such as dense attention and the oracle."""
    figure, axes = canvas(len(panels), width=6.6, height=4.8)
    for axis, (title, found) in zip(axes[0], panels.items(), strict=True):
        ordered = sorted(found, key=lambda bar: -bar[1])
        for place, (name, value, remark) in enumerate(ordered):
            colour = RESIDUA if name == residua else REFERENCE if name in references else OTHERS[3]
            axis.barh(place, value, color=colour)
            axis.annotate(remark, (value, place), (4, 0), textcoords="offset points", va="center", size=8, color=INK)
        axis.grid(visible=False, axis="y")
        axis.set_yticks(range(len(ordered)), [name for name, _, _ in ordered], fontsize=9)
        axis.set_xlim(0, 1.35 * max(value for _, value, _ in ordered) or 1.0)
        axis.set(title=title, xlabel=xlabel)
    return drawn(figure)


def estimate_scatter(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], factor: float) -> Drawing:
    """Panel -> model -> (true, estimated) error, with the identity and a band of a factor around it."""
    figure, axes = canvas(len(panels), width=4.6, height=4.2)
    every = [pair for models in panels.values() for pairs in models.values() for pair in pairs]
    seen = [value for pair in every for value in pair if value > 0] or [0.01, 1.0]
    ends = [0.6 * min(seen), 1.6 * max(seen)]
    for axis, (title, models) in zip(axes[0], panels.items(), strict=True):
        _identity(axis, ends, ends, title)
        axis.set(xlabel="true mean row error", ylabel="estimated by the call")
        low, high = ([end * by for end in ends] for by in (1 / factor, factor))
        axis.fill_between(ends, low, high, color=GRID, alpha=0.6)
        for (model, colour), mark in zip(colours(list(models)).items(), cycle(MARKS), strict=False):
            x, y = zip(*models[model], strict=True) if models[model] else ((), ())
            axis.scatter(x, y, s=20, alpha=0.7, color=colour, marker=mark, label=model, linewidths=0)
    axes[0, 0].legend(frameon=False, fontsize=8, loc="upper left", labelcolor=INK)
    return drawn(figure)


def stacked(bars: Mapping[str, Mapping[str, float]], xlabel: str) -> Drawing:
    """One horizontal bar per name; its parts from left to right, in the same order for all."""
    figure, axes = canvas(width=9.6, height=1.4 + 0.45 * len(bars))
    axis, names = axes[0, 0], list(bars)
    parts = [part for part in next(iter(bars.values())) if any(found[part] > 0 for found in bars.values())]
    for part, colour in zip(parts, cycle(PART_COLOURS), strict=False):
        left = [sum(bars[name][before] for before in parts[: parts.index(part)]) for name in names]
        axis.barh(range(len(names)), [bars[name][part] for name in names], 0.62, left, color=colour, label=part)
    for place, name in enumerate(names):
        total = sum(bars[name][part] for part in parts)
        axis.annotate(f"{total:.1f}", (total, place), (4, 0), textcoords="offset points", va="center", color=INK)
    axis.grid(visible=False, axis="y")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(xlabel)
    axis.margins(x=0.08)
    _legend_below(figure, axis, 5)
    return drawn(figure)

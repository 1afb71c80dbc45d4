"""Many measurements: speed-up over tokens with its limit, and where the time of a call goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...util.files import write_whole
from ..reports.figure import INK, OTHERS, PART_COLOURS, RESIDUA, canvas, drawn
from .attention import CallCase


def tasks(base: CallCase, tokens: Sequence[int], densities: Sequence[float]) -> list[CallCase]:
    """One task for every density and token count."""
    return [replace(base, tokens=n, density=d) for d in densities for n in tokens]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws measurements, as they stand in the JSON, to a PNG."""
    figure, axes = canvas(2, width=6, height=4.6)
    _speed_panel(axes[0, 0], rows)
    _stage_panel(axes[0, 1], rows)
    first, task = rows[0], rows[0]["task"]
    figure.suptitle(
        f"Warm call, reconstruction {task['reconstruction']}, against dense SDPA: {first['cpu']}, "
        f"{first['threads']} threads, {task['dtype']}, head dim {task['head_dim']}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    png = drawn(figure).png
    write_whole(path, lambda scratch: scratch.write_bytes(png))


def _speed_panel(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    densities = sorted({row["task"]["density"] for row in rows})
    for colour, density in zip((RESIDUA, *OTHERS), densities, strict=False):
        line = sorted((r for r in rows if r["task"]["density"] == density), key=lambda r: r["task"]["tokens"])
        tokens = [row["task"]["tokens"] for row in line]
        axes.plot(tokens, [row["speedup"] for row in line], "o-", color=colour, label=f"density {density:g}")
        axes.axhline(1 / density, color=colour, linestyle=":", linewidth=1.2)
        axes.annotate(
            f"limit {1 / density:.2f}x",
            (tokens[-1], 1 / density),
            (-2, 3),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontsize=8,
        )
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["task"]["tokens"] for row in rows}))
    axes.get_xaxis().set_major_formatter(lambda value, _: f"{int(value):,}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens", ylabel="speed-up over dense", title="Speed-up of the whole call")
    axes.legend(frameon=False, fontsize=9)


def _stage_panel(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Stages of the calls at the density nearest to the paper's, in units of the limit's time."""
    density = min({row["task"]["density"] for row in rows}, key=lambda d: abs(d - 0.22))
    line = sorted((r for r in rows if r["task"]["density"] == density), key=lambda r: r["task"]["tokens"])
    names = [name for name in line[0]["stages_ms"] if any(row["stages_ms"][name] > 0.05 for row in line)]
    places, base = range(len(line)), [0.0] * len(line)
    for colour, name in zip(PART_COLOURS, names, strict=False):
        heights = [row["stages_ms"][name] / (density * row["dense_ms"]) for row in line]
        axes.bar(places, heights, bottom=base, color=colour, label=name, width=0.6)
        base = [low + high for low, high in zip(base, heights, strict=True)]
    axes.axhline(1, color=INK, linestyle=":", linewidth=1.2)
    axes.annotate("limit: density x dense time", (len(line) - 0.6, 1.01), ha="right", fontsize=8)
    axes.set_xticks(list(places), [f"{row['task']['tokens']:,}" for row in line])
    axes.set(xlabel="tokens", ylabel="time / limit", title=f"Where the time goes at density {density:g}")
    axes.legend(frameon=False, fontsize=9)

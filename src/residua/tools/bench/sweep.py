"""Many measurements: speed-up over tokens with its limit, and where the time of a call goes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...util.files import write_whole
from ..reports.figure import Drawing, curves, stacked
from .attention import CallCase, CallTimes

PAPER = 0.22  # the density of the paper


def tasks(base: CallCase, tokens: Sequence[int], densities: Sequence[float]) -> list[CallCase]:
    """One task for every density and token count."""
    return [replace(base, tokens=n, density=d) for d in densities for n in tokens]


def drawings(rows: Sequence[CallTimes]) -> dict[str, Drawing]:
    """The figures of a sweep by the names of their files."""
    return {"sweep.png": speed_ups(rows), "stages.png": stages(rows)}


def speed_ups(rows: Sequence[CallTimes]) -> Drawing:
    """Speed-up of the whole call over tokens, a line per density and one for what it can be at most."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: (row.task.density, row.task.tokens)):
        density, limit = f"density {row.task.density:g}", f"limit at {row.task.density:g}"
        lines.setdefault(density, []).append((row.task.tokens, row.speedup))
        lines.setdefault(limit, []).append((row.task.tokens, row.limit))
    task = rows[0].task
    title = f"Warm call, {task.reconstruction}, {task.dtype}, head dim {task.head_dim}, {rows[0].threads} threads"
    return curves({title: lines}, "tokens", "speed-up over dense SDPA")


def stages(rows: Sequence[CallTimes]) -> Drawing:
    """Stages of the calls at the density nearest to the paper's, in units of the limit's time."""
    density = min({row.task.density for row in rows}, key=lambda d: abs(d - PAPER))
    line = sorted((row for row in rows if row.task.density == density), key=lambda row: row.task.tokens)
    bars = {
        f"{row.task.tokens:,} tokens": {name: ms / (density * row.dense_ms) for name, ms in row.stages_ms.items()}
        for row in line
    }
    return stacked(bars, f"time / limit, which is {density:g} x the time of dense attention")


def write_drawings(found: Mapping[str, Drawing], folder: Path) -> None:
    """Each completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in found.items():
        write_whole(folder / name, lambda scratch, png=drawing.png: scratch.write_bytes(png))  # type: ignore[misc]

"""Quality against efficiency over many settings: the paper's end-to-end table, for any pipeline."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...config import Config
from ...errors import InputError
from ...hosts import Settings, find_quality
from ...method.reconstruction import RECONSTRUCTIONS
from ...util import json_text
from .. import doctor
from ..metrics.physics import PhysicsRow, physics_table
from ..metrics.video_quality import Lpips
from ..reports.figure import REFERENCE, colours
from ..reports.table import Table, counted
from .averages import dense_figures, mean_floor, sparse_figures
from .compare import Watch, against, dense_baseline
from .comparison import Baseline, Comparison, machine
from .floor import MEANING
from .floor import NAME as DENSE_AGAIN
from .flops import flops_unit
from .run import Request

OURS = "response, anchored"  # the line of this project's method
FILES = ("compare.md", "compare.json", "compare.png")
COLUMNS = {
    "partition": "partition",
    "reconstruction": "reconstruction",
    "quality": "quality",
    "max_error": "max error",
    "target": "target",
    "cost": "cost",
    "density": "density",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "gmsd": "GMSD",
    "lpips": "LPIPS",
    "error": "attention error",
    "pflops": "PFLOPs",
    "speedup": "speed-up",
    "seconds": "seconds",
}
FORMS = {
    "max_error": "{:g}",
    "target": "{:.0%}",
    "cost": "{:.1%}",
    "density": "{:.1%}",
    "psnr": "{:.2f}",
    "ssim": "{:.4f}",
    "gmsd": "{:.4f}",
    "lpips": "{:.4f}",
    "error": "{:.4f}",
    "pflops": "{:.4g}",
    "speedup": "{:.2f}x",
    "seconds": "{:.1f}",
}
TITLES = {
    "psnr": "PSNR, dB",
    "speedup": "speed-up",
    "density": "density of the sparse calls",
    "cost": "cost of the sparse calls, share of dense attention",
}
PANELS = (("cost", "psnr"), ("speedup", "psnr"), ("density", "psnr"), ("density", "speedup"))  # x, y


@dataclass(frozen=True)
class Row:
    """One setting, averaged over the prompts; None: not measured or not asked for. With `max_error`, `target`
    is the most that may be spent. `cost` is that of the sparse calls, as a share of dense attention."""

    partition: str
    reconstruction: str
    quality: str | None
    max_error: float | None
    target: float | None
    cost: float | None
    density: float | None
    psnr: float | None
    ssim: float | None
    lpips: float | None
    error: float | None
    pflops: float | None
    speedup: float | None
    seconds: float | None
    gmsd: float | None = None
    physics: PhysicsRow | None = None  # None: not the model in the box

    @property
    def line(self) -> str:
        """The line of the plot that this setting belongs to."""
        if self.quality is not None:
            return "quality"
        bounded = "" if self.max_error is None else ", by max error"
        return f"{self.partition}, {self.reconstruction}{bounded}"

    @property
    def is_dense(self) -> bool:
        return self.partition in ("dense", DENSE_AGAIN)

    @property
    def name(self) -> str:
        """Short name for a terminal: what was asked for."""
        if self.is_dense:
            return self.partition
        if self.quality is not None:
            return self.quality
        bound = "" if self.max_error is None else f" ≤{self.max_error:g}"
        target = "" if self.target is None else f" {self.target:.0%}"
        return f"{self.partition}, {self.reconstruction}{bound}{target}"


def settings(
    densities: Sequence[float],
    partitions: Sequence[str],
    reconstructions: Sequence[str],
    base: Settings,
    max_errors: Sequence[float] = (),
    qualities: Sequence[str] = (),
) -> list[Settings]:
    """Every combination, validated before anything runs. A setting with an error bound may spend the largest
    of the densities; a quality has its own partition, reconstruction and density."""
    configs = [
        Config(density=density, partition=partition, reconstruction=reconstruction)
        for partition, reconstruction, density in itertools.product(partitions, reconstructions, densities)
    ]
    ceiling, estimating = max(densities, default=Config().density), _estimating(reconstructions, max_errors)
    configs += [
        Config(density=ceiling, partition=partition, reconstruction=reconstruction, max_error=bound)
        for partition, reconstruction, bound in itertools.product(partitions, estimating, max_errors)
    ]
    todo = [replace(base, config=config) for config in configs]
    todo += [replace(base, quality=name) for name in qualities]
    if not todo:
        raise InputError("nothing to compare: give densities, max errors or qualities")
    return todo


def _estimating(reconstructions: Sequence[str], max_errors: Sequence[float]) -> list[str]:
    """The reconstructions that estimate an error which can be bounded."""
    found = [name for name in reconstructions if name not in RECONSTRUCTIONS or RECONSTRUCTIONS[name].all_in]
    if max_errors and not found:
        known = " or ".join(name for name, reconstruction in RECONSTRUCTIONS.items() if reconstruction.all_in)
        raise InputError(
            f"an error bound needs an error estimate; {', '.join(reconstructions)} gives none: add {known}"
        )
    return found


def rows_so_far(
    pipe: Any,
    model: str,
    requests: Sequence[Request],
    todo: Sequence[Settings],
    lpips: Lpips | str,
    watch: Watch,
    floor: bool = True,
) -> Iterator[tuple[list[Row], int]]:
    """Yields the rows so far and the video tokens after each setting; dense comes first, then the second
    dense run if the `floor` is wanted."""
    baselines = [dense_baseline(pipe, request, todo[0], watch, floor=floor, lpips=lpips) for request in requests]
    rows: list[Row] = []
    for settings in todo:
        found = [
            against(pipe, model, request, settings, dense, lpips=lpips, steps=watch(_name(settings)))
            for request, dense in zip(requests, baselines, strict=True)
        ]
        if not rows:
            rows += _dense_rows(found, baselines)
        rows.append(_row(settings, found))
        yield rows, found[0].tokens


def result_files(rows: Sequence[Row], facts: dict[str, Any]) -> dict[str, bytes]:
    content = {**facts, "rows": [asdict(row) for row in rows], "versions": doctor.versions(), "machine": machine()}
    text = json_text.dumps(content, indent=2) + "\n"
    return dict(zip(FILES, (markdown(rows, facts).encode(), text.encode(), plot(rows)), strict=True))


def in_readable_flops(rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """The rows with their `pflops` in a unit that is easy to read, and that unit."""
    unit, factor = flops_unit(row.pflops for row in rows)
    return unit, [row if row.pflops is None else replace(row, pflops=factor * row.pflops) for row in rows]


def cells(row: Row, columns: Iterable[str] = COLUMNS) -> list[str]:
    values = asdict(row)
    return [_cell(name, values[name]) for name in columns]


def markdown(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    unit, rows = in_readable_flops(rows)
    lines = [
        f"# {facts['model']}: quality against efficiency",
        "",
        f"{facts['tokens']:,} video tokens, {facts['steps'] or 'default'} steps, "
        f"{counted(len(facts['prompts']), 'prompt')}, seed {facts['seed']}. "
        "PSNR, SSIM, GMSD and LPIPS against the dense video of the same seed; "
        "speed-up of the whole generation, dense steps included; cost of the sparse calls as a share "
        "of dense attention, with probes, router and summary; FLOPs of the transformer (self-attention and "
        "matrix products).",
        *(f"LPIPS was not measured: {reason}." for reason in [facts["lpips_not_measured"]] if reason),
        *(f"{DENSE_AGAIN}: {text}" for text in floor_remarks(rows)),
        "",
        "| " + " | ".join({**COLUMNS, "pflops": unit}.values()) + " |",
        "|" + "---|" * 3 + "---:|" * (len(COLUMNS) - 3),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        *(part for one in physics_tables(rows) for part in [*one.markdown().splitlines(), ""]),
        "```",
        facts["command"],
        "```",
    ]
    return "\n".join(lines) + "\n"


def physics_tables(rows: Sequence[Row]) -> list[Table]:
    """One table of the physics; none for other models."""
    return physics_table({row.name: row.physics for row in rows})


def floor_remarks(rows: Sequence[Row]) -> list[str]:
    """What the row of the second dense run means, if there is one."""
    found = next((row for row in rows if row.partition == DENSE_AGAIN), None)
    if found is None:
        return []
    if found.psnr is None:
        return [f"{MEANING}: for at least one prompt not a bit differs, so that the floor has no PSNR."]
    return [f"{MEANING}: the floor. A PSNR near {found.psnr:.1f} dB cannot be told from a second dense run."]


def plot(rows: Sequence[Row]) -> bytes:
    """Quality over cost, one line per partition and reconstruction. The points of a line are ordered by what
    was asked for, so that a noisy speed-up does not tangle it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    sparse = [row for row in rows if not row.is_dense]
    lowest = next((row.psnr for row in rows if row.partition == DENSE_AGAIN), None)
    names = list(dict.fromkeys(row.line for row in sparse))
    chosen = colours(names, OURS)
    for axis, (x, y) in zip(panels.flat, PANELS, strict=True):
        for line, colour in chosen.items():
            _draw(axis, x, y, [row for row in sparse if row.line == line], colour)
        if y == "psnr" and lowest is not None:
            axis.axhline(lowest, color=REFERENCE, linestyle=":", label="floor (dense again)")
        axis.set_xlabel(TITLES[x])
        axis.set_title(TITLES[y], loc="left")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles = panels.flat[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw(axis: Any, x: str, y: str, line: list[Row], colour: str) -> None:
    line = sorted(line, key=lambda row: (row.max_error or 0.0, row.target or 0.0))
    known = [row for row in line if getattr(row, x) is not None and getattr(row, y) is not None]
    style = "--" if line[0].max_error is not None else "-"
    xs, ys = [getattr(row, x) for row in known], [getattr(row, y) for row in known]
    axis.plot(xs, ys, style, color=colour, marker="*" if line[0].quality else "o", label=line[0].line)
    for row, at in zip(known, zip(xs, ys, strict=True), strict=True):
        if row.quality is not None:
            axis.annotate(row.quality, at, xytext=(5, 4), textcoords="offset points", fontsize="small")


def _row(settings: Settings, found: list[Comparison]) -> Row:
    config = _config(settings)
    return Row(
        partition=config.partition,
        reconstruction=config.reconstruction,
        quality=settings.quality,
        max_error=config.max_error,
        target=config.density,
        **sparse_figures(found),
    )


def _dense_rows(found: list[Comparison], baselines: list[Baseline]) -> list[Row]:
    """The row of dense, and of the second dense run if there was one."""
    dense = Row(
        partition="dense",
        reconstruction="-",
        quality=None,
        max_error=None,
        target=None,
        **dense_figures(found, baselines),
    )
    floor = mean_floor(baselines)
    if floor is None:
        return [dense]
    return [dense, replace(dense, partition=DENSE_AGAIN, speedup=None, seconds=None, physics=None, **floor)]


def _name(settings: Settings) -> str:
    if settings.quality is not None:
        return settings.quality
    config = _config(settings)
    asked = f"{config.density:g}" if config.max_error is None else f"≤{config.max_error:g}"
    return f"{asked} {config.partition} {config.reconstruction}"


def _config(settings: Settings) -> Config:
    if settings.quality is not None:
        return find_quality(settings.quality).config()
    assert settings.config is not None
    return settings.config


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return FORMS[name].format(value) if name in FORMS else str(value)

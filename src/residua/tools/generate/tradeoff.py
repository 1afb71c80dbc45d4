"""`residua compare`: quality against efficiency over many settings, for any pipeline."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import Config
from ...errors import InputError
from ...hosts import Settings, find_quality
from ...method.reconstructions import RECONSTRUCTIONS
from ...util import json_text
from .. import doctor
from ..metrics.physics import physics_table
from ..reports.figure import REFERENCE, canvas, colours, drawn
from ..reports.page import Page
from ..reports.table import Table, counted, number
from .averages import DENSE_AGAIN, MeanRow, table
from .comparison import machine
from .noise_floor import MEANING

OURS = "response, anchored"  # the line of this project's method
FILES = ("compare.md", "compare.json", "compare.png")
ASKED = {"partition": "{}", "reconstruction": "{}", "quality": "{}", "max_error": "{:g}", "target": "{:.0%}"}
# Columns that a terminal has no room for.
WIDE = ("partition", "reconstruction", "quality", "max error", "target", "density", "in CPU time", "seconds")
TITLES = {
    "psnr": "PSNR, dB",
    "speedup": "speed-up",
    "density": "density of the sparse calls",
    "cost": "cost of the sparse calls, share of dense attention",
}
PANELS = (("cost", "psnr"), ("speedup", "psnr"), ("density", "psnr"), ("density", "speedup"))  # x, y


def all_settings(
    densities: Sequence[float],
    partitions: Sequence[str],
    reconstructions: Sequence[str],
    base: Settings,
    max_errors: Sequence[float] = (),
    qualities: Sequence[str] = (),
) -> list[tuple[str, Settings]]:
    """Every combination by a short name, validated before anything runs. A setting with an error bound may spend
    the largest of the densities; a quality has its own partition, reconstruction and density."""
    configs = [
        Config(density=density, partition=partition, reconstruction=reconstruction)
        for partition, reconstruction, density in itertools.product(partitions, reconstructions, densities)
    ]
    highest, estimating = max(densities, default=Config().density), _estimating(reconstructions, max_errors)
    configs += [
        Config(density=highest, partition=partition, reconstruction=reconstruction, max_error=bound)
        for partition, reconstruction, bound in itertools.product(partitions, estimating, max_errors)
    ]
    todo = [(_name(config), replace(base, config=config)) for config in configs]
    todo += [(name, replace(base, quality=name)) for name in qualities]
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


def _name(config: Config) -> str:
    bound = "" if config.max_error is None else f" ≤{config.max_error:g}"
    return f"{config.partition}, {config.reconstruction}{bound} {config.density:.0%}"


def asked(row: MeanRow) -> dict[str, Any]:
    """What was asked for. With `max_error`, `target` is the most that may be spent."""
    if row.settings is None:
        return {**dict.fromkeys(ASKED), "partition": row.name, "reconstruction": "-"}
    quality = row.settings.quality
    config = row.settings.config if quality is None else find_quality(quality).config()
    assert config is not None
    return {
        "partition": config.partition,
        "reconstruction": config.reconstruction,
        "quality": quality,
        "max_error": config.max_error,
        "target": config.density,
    }


def tables(rows: Sequence[MeanRow], title: str) -> list[Table]:
    """Everything that was asked for and measured, and the physics of the model in the box."""
    names, found = [row.name for row in rows], [asked(row) for row in rows]
    labels = {name.replace("_", " "): [number(one[name], form) for one in found] for name, form in ASKED.items()}
    physics = physics_table({row.name: row.physics for row in rows})
    return [table(title, "setting", names, rows, labels), *physics]


def result_files(rows: Sequence[MeanRow], facts: dict[str, Any]) -> dict[str, bytes]:
    """Every file by its name.

    Args:
        rows: What was measured.
        facts: "model", "prompts", "seed", "steps", "tokens", "command" and "lpips_not_measured" of the run.
    """
    found = [{**asked(row), **row.figures()} for row in rows]
    content = {**facts, "rows": found, "versions": doctor.versions(), "machine": machine()}
    text = json_text.dumps(content, indent=2) + "\n"
    return dict(zip(FILES, (markdown(rows, facts).encode(), text.encode(), plot(rows)), strict=True))


def markdown(rows: Sequence[MeanRow], facts: dict[str, Any]) -> str:
    lead = (
        f"{facts['tokens']:,} video tokens, {facts['steps'] or 'default'} steps, "
        f"{counted(len(facts['prompts']), 'prompt')}, seed {facts['seed']}. "
        "PSNR, SSIM, GMSD and LPIPS against the dense video of the same seed; "
        "speed-up of the whole generation, dense steps included; cost of the sparse calls as a share "
        "of dense attention, with probes, router and summary; FLOPs of the transformer (self-attention and "
        "matrix products)."
    )
    missing = [f"LPIPS was not measured: {reason}." for reason in [facts["lpips_not_measured"]] if reason]
    again = [f"{DENSE_AGAIN}: {text}" for text in floor_remarks(rows)]
    title = f"{facts['model']}: quality against efficiency"
    return Page(title, "\n\n".join([lead, *missing, *again]), facts["command"], tables(rows, "Settings")).markdown()


def floor_remarks(rows: Sequence[MeanRow]) -> list[str]:
    """What the row of the second dense run means, if there is one."""
    found = next((row for row in rows if row.name == DENSE_AGAIN), None)
    if found is None:
        return []
    if found.psnr is None:
        return [f"{MEANING}: for at least one prompt not a bit differs, so that the noise floor has no PSNR."]
    return [f"{MEANING}: the noise floor. A PSNR near {found.psnr:.1f} dB cannot be told from a second dense run."]


def plot(rows: Sequence[MeanRow]) -> bytes:
    """Quality over cost, one line per partition and reconstruction. The points of a line are ordered by what
    was asked for, so that a noisy speed-up does not tangle it."""
    figure, panels = canvas(2, 2)
    lines: dict[str, list[MeanRow]] = {}
    for row in rows:
        if row.settings is not None:
            lines.setdefault(_line(row), []).append(row)
    lowest = next((row.psnr for row in rows if row.name == DENSE_AGAIN), None)
    chosen = colours(list(lines), OURS)
    for axis, (x, y) in zip(panels.flat, PANELS, strict=True):
        for line, colour in chosen.items():
            _draw(axis, x, y, lines[line], line, colour)
        if y == "psnr" and lowest is not None:
            axis.axhline(lowest, color=REFERENCE, linestyle=":", label="noise floor (dense again)")
        axis.set_xlabel(TITLES[x])
        axis.set_title(TITLES[y], loc="left")
    handles = panels.flat[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return drawn(figure).png


def _line(row: MeanRow) -> str:
    """The line of the plot that a setting belongs to."""
    one = asked(row)
    if one["quality"] is not None:
        return "quality"
    return f"{one['partition']}, {one['reconstruction']}{'' if one['max_error'] is None else ', by max error'}"


def _draw(axis: Any, x: str, y: str, rows: list[MeanRow], line: str, colour: str) -> None:
    ordered = sorted(rows, key=lambda row: (asked(row)["max_error"] or 0.0, asked(row)["target"]))
    known = [row for row in ordered if getattr(row, x) is not None and getattr(row, y) is not None]
    style = "--" if asked(ordered[0])["max_error"] is not None else "-"
    xs, ys = [getattr(row, x) for row in known], [getattr(row, y) for row in known]
    axis.plot(xs, ys, style, color=colour, marker="*" if line == "quality" else "o", label=line)
    for row, at in zip(known, zip(xs, ys, strict=True), strict=True):
        if line == "quality":
            axis.annotate(row.name, at, xytext=(5, 4), textcoords="offset points", fontsize="small")

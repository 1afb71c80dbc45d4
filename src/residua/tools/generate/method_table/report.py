"""The measured methods as the paper's Table 1 and its runtime figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ....baselines.methods import find_method
from ... import doctor
from ...metrics.physics import physics_table
from ...reports import figure
from ...reports.page import Page, Picture
from ...reports.table import Table, counted, number, share
from ..comparison import machine
from ..floor import MEANING
from ..floor import NAME as DENSE_AGAIN
from ..flops import flops_unit
from ..videos import contact_sheet, encode_png, to_pixels
from .measure import DENSE, PARTS, Measured, MethodRow

OURS = "anchored"
MAX_WAITING = 0.1  # warn if other work had the core for more than this share of the time
FRAMES_CAPTION = "The first prompt: evenly spaced frames of the clip that each method generated."
RUNTIME_CAPTION = (
    "Where the seconds of one generation go. The kernels gather the rows of a group as they read them and "
    "put them back as they write: permutation and restoration are inside the attention pairs. The dense "
    "bar is split as one dense step was."
)


def table(rows: Sequence[MethodRow], title: str) -> Table:
    """The columns of the paper's Table 1 and those that only Residua can fill; empty columns are left out."""
    unit, factor = flops_unit(row.pflops for row in rows)
    columns = {
        "PSNR, dB": [number(row.psnr, "{:.2f}") for row in rows],
        "SSIM": [number(row.ssim, "{:.4f}") for row in rows],
        "GMSD": [number(row.gmsd, "{:.4f}") for row in rows],
        "LPIPS": [number(row.lpips, "{:.4f}") for row in rows],
        "ImgQual": [number(row.scores.get("imaging_quality"), "{:.4f}") for row in rows],
        "SubCons": [number(row.scores.get("subject_consistency"), "{:.4f}") for row in rows],
        "PBench": [number(row.scores.get("pbench"), "{:.4f}") for row in rows],
        "density": [number(row.density, "{:.1%}") for row in rows],
        "cost": [number(row.cost, "{:.1%}") for row in rows],
        unit: [number(None if row.pflops is None else factor * row.pflops, "{:.3g}") for row in rows],
        "speed-up": [number(row.speedup, "{:.2f}x") for row in rows],
        "in CPU time": [number(row.cpu_speedup, "{:.2f}x") for row in rows],
        "estimated error": [number(row.error, "{:.4f}") for row in rows],
    }
    return Table.filled(title, "method", [row.title for row in rows], columns, emphasis=find_method(OURS).title)


def runtime(rows: Sequence[MethodRow]) -> list[Picture]:
    """The stacked bars; empty if stages were not timed."""
    timed = [row for row in rows if row.parts]
    if len(timed) < 2:
        return []
    bars = {row.title: {PARTS[name]: row.parts.get(name, 0.0) for name in PARTS} for row in timed}
    return [Picture("runtime", "Runtime", RUNTIME_CAPTION, figure.stacked(bars, "seconds of one generation"))]


def disturbed(rows: Sequence[MethodRow]) -> list[str]:
    """A warning if other work had so much of the machine that the times say little about the methods."""
    worst = max((row.waiting or 0.0 for row in rows), default=0.0)
    if worst <= MAX_WAITING:
        return []
    return [
        f"Other work held up as much as {worst:.0%} of a generation: the speed-up and the runtime figure say "
        "little here, the speed-up in CPU time a little more. Measure again on a quiet machine."
    ]


def make_report(found: Measured, facts: Mapping[str, Any], command: str) -> Page:
    """The whole report.

    Args:
        found: What was measured.
        facts: "model", "density", "prompts", "seed" and "steps" of the runs.
        command: The command line that repeats it.
    """
    names = [row.method for row in found.rows if row.method not in (DENSE, DENSE_AGAIN)]
    sources = {
        find_method(name).title: f"{find_method(name).source}. Simplified: {find_method(name).simplified}."
        for name in names
    }
    hardware = machine()
    return Page(
        title=f"{facts['model']}: methods at {share(facts['density'], 0)} of the pairs",
        lead=f"{found.tokens:,} video tokens, {facts['steps'] or 'default'} steps, "
        f"{counted(len(facts['prompts']), 'prompt')}, seed {facts['seed']}. "
        "PSNR, SSIM, GMSD and LPIPS against the dense video of the same seed; "
        "cost of the sparse calls as a share of dense attention; speed-up of the whole generation; "
        "the error is what a method says of itself while it runs.",
        command=command,
        tables=[
            table(found.rows, "Quality and efficiency (the paper's Table 1)"),
            *physics_table({row.title: row.physics for row in found.rows}, find_method(OURS).title),
        ],
        pictures=[_frames(found), *runtime(found.rows)],
        warnings=disturbed(found.rows),
        facts={
            **{f"not measured: {name}": reason for name, reason in found.not_measured.items()},
            **({DENSE_AGAIN: f"{MEANING}: no PSNR tells more"} if found.has_floor else {}),
            "prompts": "; ".join(facts["prompts"]),
            "machine": f"{hardware['cpu']}, {counted(hardware['threads'], 'thread')}"
            + "".join(f", {gpu}" for gpu in hardware["gpus"]),
            "methods of others": "PyTorch code of this project around the same attention backend: their "
            "times compare with each other, not with their authors' kernels",
            **sources,
        },
        data={
            "rows": [asdict(row) for row in found.rows],
            "model": facts["model"],
            "density": facts["density"],
            "versions": doctor.versions(),
            "machine": hardware,
        },
    )


def result_files(found: Measured, facts: Mapping[str, Any], command: str) -> dict[str, bytes]:
    """Every file of the report by its name."""
    return make_report(found, facts, command).files()


def _frames(found: Measured) -> Picture:
    """The clips of all methods, one below the other."""
    titles = {row.method: row.title for row in found.rows}
    sheet = contact_sheet({titles[name]: to_pixels(frames) for name, frames in found.clips.items()})
    height, width = sheet.shape[:2]
    return Picture("frames", "Frames", FRAMES_CAPTION, figure.bitmap(encode_png(sheet), width, height))

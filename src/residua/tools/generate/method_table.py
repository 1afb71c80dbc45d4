"""`residua compare --methods`: whole methods on one model, as the paper's Table 1 and its runtime figure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ...baselines.methods import find_method
from ...errors import InputError
from ...hosts import Settings
from ...util.json_text import is_finite
from .. import doctor
from ..metrics import vbench
from ..metrics.physics import physics_table
from ..reports import figure
from ..reports.page import Page, Picture
from ..reports.table import counted, share
from .averages import DENSE, DENSE_AGAIN, ClipSet, MeanRow, table
from .comparison import machine
from .noise_floor import MEANING
from .videos import contact_sheet, encode_mp4, encode_png, to_pixels

OURS = "anchored"
METHODS = ("sparge", "svg2", "svoo", "svg-ear", "paper", OURS)
TITLES = {DENSE: "dense (SDPA)", DENSE_AGAIN: f"{DENSE_AGAIN} (the noise floor)"}
MAX_WAITING = 0.1  # warn if other work had the core for more than this share of the time
FPS = 16  # of the clips that VBench scores
MAX_SCORE_BYTES = 1 << 20
NO_PBENCH = "PBench was not measured: it is not run here; give its scores with --pbench"
# The parts of a bar in the runtime figure, from the bottom; stages have the names that receipts use.
PARTS = {
    "rest of the model": "rest of the model",
    "dense": "attention that stays dense",
    "attention": "attention pairs",
    "budget": "budget",
    "grouping": "grouping",
    "routing": "routing",
    "summary": "summary",
    "probes": "probes",
    "reconstruction": "reconstruction",
    "exact rows": "text rows",
    "layout": "layout and receipts",
}
TABLE = "Quality and efficiency (the paper's Table 1)"
FRAMES_CAPTION = "The first prompt: evenly spaced frames of the clip that each method generated."
RUNTIME_CAPTION = (
    "Where the seconds of one generation go. The kernels gather the rows of a group as they read them and "
    "put them back as they write: permutation and restoration are inside the attention pairs. The dense "
    "bar is split as one dense step was."
)


@dataclass(frozen=True)
class MethodRows:
    """The rows so far, the clips of the first prompt, and what could not be measured."""

    rows: list[MeanRow]
    clips: dict[str, np.ndarray]
    tokens: int
    not_measured: dict[str, str]


def title(name: str) -> str:
    """The name of a method, or of dense attention, in a table."""
    return TITLES.get(name) or find_method(name).title


def chosen_methods(names: Sequence[str]) -> list[str]:
    """The method names without repeats; unknown ones are refused before a model is loaded. Dense is always
    measured."""
    methods = [name for name in dict.fromkeys(names) if name != DENSE]
    for name in methods:
        find_method(name)
    if not methods:
        raise InputError(f"--methods names nothing but dense; wanted some of {', '.join(METHODS)}")
    return methods


def measure(
    clips: ClipSet, settings: Sequence[tuple[str, Settings]], *, device: str, pbench: Mapping[str, float] | None = None
) -> Iterator[MethodRows]:
    """Generates every prompt with every method; yields after each, so that a run that is interrupted keeps its results.

    Args:
        clips: The requests, with their dense clips.
        settings: How to accelerate, by the name of the method.
        device: Where VBench runs, and whether stages are timed: on CUDA that would make the calls slower.
        pbench: PBench scores by method, if the user has them.
    """
    missing: dict[str, str] = {} if pbench else {"PBench": NO_PBENCH}
    dense = [one.timed.clip.frames for one in clips.baselines]
    shown = {DENSE: dense[0]}
    scores = {DENSE: _scores(dense, DENSE, device, pbench, missing)}
    for rows, found in clips.rows_so_far(settings, time_stages=device == "cpu"):
        name, videos = rows[-1].name, [one.sparse.clip.frames for one in found]
        for one in found:
            missing.update(one.quality.not_measured)
        shown[name] = videos[0]
        scores[name] = _scores(videos, name, device, pbench, missing)
        scored = [replace(row, scores=scores.get(row.name, {})) for row in rows]
        yield MethodRows(scored, shown, found[0].tokens, missing)


def read_pbench(path: Path | None) -> dict[str, float] | None:
    """Scores by method name from a JSON object; None without a file."""
    if path is None:
        return None
    wanted = 'wanted a JSON object such as {"dense": 0.81, "anchored": 0.80}'
    try:
        if path.stat().st_size > MAX_SCORE_BYTES:
            raise InputError(f"{path}: larger than {MAX_SCORE_BYTES} bytes; {wanted}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {wanted}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); {wanted}") from error
    if not isinstance(found, dict) or not all(map(is_finite, found.values())):
        raise InputError(f"{path}: {wanted}")
    return {str(name): float(score) for name, score in found.items()}


def _scores(
    clips: Sequence[np.ndarray], method: str, device: str, pbench: Mapping[str, float] | None, missing: dict[str, str]
) -> dict[str, float]:
    """Scores that need no reference: VBench's if it is installed, PBench's from the user's file."""
    scores: dict[str, float] = {}
    reason = vbench.why_missing()
    found = [] if reason else [vbench.vbench_clip(encode_mp4(to_pixels(clip), FPS), device) for clip in clips]
    failed = [one for one in found if isinstance(one, str)]
    if reason or failed:
        missing["VBench"] = reason or failed[0]
    else:
        known = [one for one in found if not isinstance(one, str)]
        scores = {name: fmean(one[name] for one in known) for name in vbench.DIMENSIONS}
    if pbench is not None and method in pbench:
        scores["pbench"] = pbench[method]
    return scores


def runtime(rows: Sequence[MeanRow]) -> list[Picture]:
    """The stacked bars; empty if stages were not timed."""
    timed = [row for row in rows if row.parts]
    if len(timed) < 2:
        return []
    bars = {title(row.name): {PARTS[name]: row.parts.get(name, 0.0) for name in PARTS} for row in timed}
    return [Picture("runtime", "Runtime", RUNTIME_CAPTION, figure.stacked(bars, "seconds of one generation"))]


def disturbed(rows: Sequence[MeanRow]) -> list[str]:
    """A warning if other work had so much of the machine that the times say little about the methods."""
    worst = max((row.waiting or 0.0 for row in rows), default=0.0)
    if worst <= MAX_WAITING:
        return []
    return [
        f"Other work held up as much as {worst:.0%} of a generation: the speed-up and the runtime figure say "
        "little here, the speed-up in CPU time a little more. Measure again on a quiet machine."
    ]


def methods_page(found: MethodRows, facts: Mapping[str, Any]) -> Page:
    """The whole report.

    Args:
        found: What was measured.
        facts: "model", "density", "prompts", "seed", "steps" and "command" of the runs.
    """
    names = [row.name for row in found.rows if row.settings is not None]
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
        command=facts["command"],
        tables=[
            table(TABLE, "method", [title(row.name) for row in found.rows], found.rows, emphasis=title(OURS)),
            *physics_table({title(row.name): row.physics for row in found.rows}, title(OURS)),
        ],
        pictures=[_frames(found), *runtime(found.rows)],
        warnings=disturbed(found.rows),
        facts={
            **{f"not measured: {name}": reason for name, reason in found.not_measured.items()},
            **(
                {DENSE_AGAIN: f"{MEANING}: no PSNR tells more"}
                if any(row.name == DENSE_AGAIN for row in found.rows)
                else {}
            ),
            "prompts": "; ".join(facts["prompts"]),
            "machine": f"{hardware['cpu']}, {counted(hardware['threads'], 'thread')}"
            + "".join(f", {gpu}" for gpu in hardware["gpus"]),
            "methods of others": "PyTorch code of this project around the same attention backend: their "
            "times compare with each other, not with their authors' kernels",
            **sources,
        },
        data={
            "rows": [{"method": row.name, "title": title(row.name), **row.figures()} for row in found.rows],
            "model": facts["model"],
            "density": facts["density"],
            "versions": doctor.versions(),
            "machine": hardware,
        },
    )


def _frames(found: MethodRows) -> Picture:
    """The clips of all methods, one below the other."""
    sheet = contact_sheet({title(name): to_pixels(frames) for name, frames in found.clips.items()})
    height, width = sheet.shape[:2]
    return Picture("frames", "Frames", FRAMES_CAPTION, figure.bitmap(encode_png(sheet), width, height))

"""Compares methods on a whole model: the paper's Table 1 and its runtime figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from .. import doctor
from ..errors import InputError
from ..json_text import is_finite
from ..lab import figures
from ..lab.report import Picture, Report
from ..lab.tables import Table, share
from ..lab.vbench import DIMENSIONS, installed, vbench_clip
from ..lab.video_quality import Lpips
from ..methods import find_method
from .averages import dense_figures, mean, mean_floor, sparse_figures
from .comparison import Baseline, Comparison, Watch, against, dense_baseline, machine
from .floor import MEANING
from .floor import NAME as DENSE_AGAIN
from .flops import flops_unit
from .physics import PhysicsRow, physics_table
from .run import Request
from .sparsity import Sparsity
from .videos import contact_sheet, encode_mp4, encode_png, to_pixels

DENSE = "dense"
METHODS = ("sparge", "svg2", "svoo", "svg-ear", "paper", "anchored")
OURS = "anchored"
FPS = 16  # of the clips that VBench scores
MAX_SCORE_BYTES = 1 << 20
MAX_WAITING = 0.1  # warn if other work had the core for more than this share of the time
NO_PBENCH = "PBench was not measured: it is not run here; give its scores with --pbench"
# The parts of a bar in the runtime figure, from the bottom; stages have the names that receipts use.
PARTS = {
    "rest of the model": "rest of the model", "dense": "attention that stays dense",
    "attention": "attention pairs", "grouping": "grouping", "routing": "routing", "summary": "summary",
    "probes": "probes", "reconstruction": "reconstruction", "exact rows": "text rows",
    "layout": "layout and receipts",
}  # fmt: skip
RUNTIME_CAPTION = (
    "Where the seconds of one generation go. The kernels gather the rows of a group as they read them and "
    "put them back as they write: permutation and restoration are inside the attention pairs. The dense "
    "bar is split as one dense step was."
)


@dataclass(frozen=True)
class MethodRow:
    """One method, averaged over the prompts; None: not measured."""

    method: str
    title: str
    density: float | None
    cost: float | None  # of the sparse calls without grouping, as a share of dense attention
    psnr: float | None
    ssim: float | None
    lpips: float | None
    error: float | None  # of attention, as estimated by the method itself
    pflops: float | None
    speedup: float | None
    cpu_speedup: float | None  # in processor time, which other work on the machine distorts least
    seconds: float
    waiting: float | None  # share of the time in which other work had the core
    scores: dict[str, float] = field(default_factory=dict)  # VBench's scores, and PBench's
    parts: dict[str, float] = field(default_factory=dict)  # seconds by part; empty unless profiled
    gmsd: float | None = None
    physics: PhysicsRow | None = None  # None: not the model in the box


@dataclass(frozen=True)
class Measured:
    """The rows so far, the clips of the first prompt, and what could not be measured."""

    rows: list[MethodRow]
    clips: dict[str, np.ndarray]
    tokens: int
    not_measured: dict[str, str]

    @property
    def has_floor(self) -> bool:
        return any(row.method == DENSE_AGAIN for row in self.rows)


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
    pipe: Any,
    model: str,
    requests: Sequence[Request],
    settings: Mapping[str, Sparsity],
    lpips: Lpips | str,
    watch: Watch,
    *,
    profile: bool,
    device: str,
    pbench: Mapping[str, float] | None = None,
    floor: bool = True,
) -> Iterator[Measured]:
    """Generates dense once per prompt, then with every method; yields after each, so that a run that is
    interrupted keeps its results.

    Args:
        pipe: The pipeline.
        model: Its name, for the tables.
        requests: What to generate, one per prompt.
        settings: How to accelerate, by the name of the method.
        lpips: A network, or the reason why there is none.
        watch: Called with the name of each run.
        profile: Whether stages are timed; on CUDA that makes the calls slower.
        device: Where VBench runs.
        pbench: PBench scores by method, if the user has them.
        floor: Whether dense runs once more, to measure how far two dense runs are apart.
    """
    first = next(iter(settings.values()))
    baselines = [
        dense_baseline(pipe, request, first, watch, split=True, floor=floor, lpips=lpips)
        for request in requests
    ]
    missing: dict[str, str] = {} if pbench else {"PBench": NO_PBENCH}
    clips = {DENSE: baselines[0].timed.clip.frames}
    rows: list[MethodRow] = []
    for name, sparsity in settings.items():
        found = [
            against(pipe, model, request, sparsity, dense, lpips=lpips, steps=watch(name), profile=profile)
            for request, dense in zip(requests, baselines, strict=True)
        ]
        if not rows:
            scores = _scores([dense.timed.clip.frames for dense in baselines], DENSE, device, pbench, missing)
            rows += _dense_rows(found, baselines, scores)
        for one in found:
            missing.update(one.quality.not_measured)
        clips[name] = found[0].sparse.clip.frames
        scores = _scores([one.sparse.clip.frames for one in found], name, device, pbench, missing)
        rows.append(_row(name, found, scores))
        yield Measured(rows, clips, found[0].tokens, missing)


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
    clips: Sequence[np.ndarray],
    method: str,
    device: str,
    pbench: Mapping[str, float] | None,
    missing: dict[str, str],
) -> dict[str, float]:
    """Scores that need no reference: VBench's if it is installed, PBench's from the user's file."""
    scores: dict[str, float] = {}
    reason = installed()
    found = [] if reason else [vbench_clip(encode_mp4(to_pixels(clip), FPS), device) for clip in clips]
    failed = [one for one in found if isinstance(one, str)]
    if reason or failed:
        missing["VBench"] = reason or failed[0]
    else:
        known = [one for one in found if not isinstance(one, str)]
        scores = {name: fmean(one[name] for one in known) for name in DIMENSIONS}
    if pbench is not None and method in pbench:
        scores["pbench"] = pbench[method]
    return scores


def _row(name: str, found: Sequence[Comparison], scores: dict[str, float]) -> MethodRow:
    return MethodRow(
        method=name,
        title=find_method(name).title,
        cpu_speedup=mean([one.cpu_speedup for one in found]),
        waiting=mean([one.waiting for one in found]),
        scores=scores,
        parts=_parts(found),
        **sparse_figures(found),
    )


def _dense_rows(
    found: Sequence[Comparison], baselines: Sequence[Baseline], scores: dict[str, float]
) -> list[MethodRow]:
    """The row of dense, and of the second dense run if there was one."""
    means = dense_figures(found, baselines)
    attention, seconds = mean([dense.attention_share for dense in baselines]), means["seconds"]
    parts = {}
    if attention is not None:
        parts = {"rest of the model": (1 - attention) * seconds, "dense": attention * seconds}
    dense = MethodRow(
        method=DENSE, title="dense (SDPA)", cpu_speedup=1.0, waiting=None, scores=scores, parts=parts, **means
    )
    floor = mean_floor(baselines)
    if floor is None:
        return [dense]
    again = replace(
        dense, method=DENSE_AGAIN, title=f"{DENSE_AGAIN} (the floor)", speedup=None, cpu_speedup=None,
        scores={}, parts={}, physics=None, **floor,
    )  # fmt: skip
    return [dense, again]


def _parts(found: Sequence[Comparison]) -> dict[str, float]:
    """Mean seconds of each part of the runtime figure; empty if stages were not timed."""
    if not all(one.report.total.stages for one in found):
        return {}
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for one in found:
        total = one.report.total
        inside = dict(total.stages)
        inside["dense"] = total.dense_seconds
        inside["layout"] = max(0.0, total.sparse_seconds - sum(total.stages.values()))
        inside["rest of the model"] = max(0.0, one.sparse.clip.seconds - total.seconds)
        for name, seconds in inside.items():
            parts[name] = parts.get(name, 0.0) + seconds / len(found)
    return parts


def table(rows: Sequence[MethodRow], title: str) -> Table:
    """The columns of the paper's Table 1 and those that only Residua can fill; empty columns are left out."""
    unit, factor = flops_unit(row.pflops for row in rows)
    columns = {
        "PSNR, dB": [_text(row.psnr, "{:.2f}") for row in rows],
        "SSIM": [_text(row.ssim, "{:.4f}") for row in rows],
        "GMSD": [_text(row.gmsd, "{:.4f}") for row in rows],
        "LPIPS": [_text(row.lpips, "{:.4f}") for row in rows],
        "ImgQual": [_text(row.scores.get("imaging_quality"), "{:.4f}") for row in rows],
        "SubCons": [_text(row.scores.get("subject_consistency"), "{:.4f}") for row in rows],
        "PBench": [_text(row.scores.get("pbench"), "{:.4f}") for row in rows],
        "density": [_text(row.density, "{:.1%}") for row in rows],
        "cost": [_text(row.cost, "{:.1%}") for row in rows],
        unit: [_text(None if row.pflops is None else factor * row.pflops, "{:.3g}") for row in rows],
        "speed-up": [_text(row.speedup, "{:.2f}x") for row in rows],
        "in CPU time": [_text(row.cpu_speedup, "{:.2f}x") for row in rows],
        "estimated error": [_text(row.error, "{:.4f}") for row in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    lines = tuple((row.title, *cells) for row, *cells in zip(rows, *shown.values(), strict=True))
    return Table(title, ("method", *shown), lines, emphasis=find_method(OURS).title)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def runtime(rows: Sequence[MethodRow]) -> list[Picture]:
    """The stacked bars; empty if stages were not timed."""
    timed = [row for row in rows if row.parts]
    if len(timed) < 2:
        return []
    bars = {row.title: {PARTS[name]: row.parts.get(name, 0.0) for name in PARTS} for row in timed}
    return [
        Picture("runtime", "Runtime", RUNTIME_CAPTION, figures.stacked(bars, "seconds of one generation"))
    ]


def disturbed(rows: Sequence[MethodRow]) -> list[str]:
    """A warning if other work had so much of the machine that the times say little about the methods."""
    worst = max((row.waiting or 0.0 for row in rows), default=0.0)
    if worst <= MAX_WAITING:
        return []
    return [
        f"Other work held up as much as {worst:.0%} of a generation: the speed-up and the runtime figure say "
        "little here, the speed-up in CPU time a little more. Measure again on a quiet machine."
    ]


def make_report(found: Measured, facts: Mapping[str, Any], command: str) -> Report:
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
    return Report(
        title=f"{facts['model']}: methods at {share(facts['density'], 0)} of the pairs",
        lead=f"{found.tokens:,} video tokens, {facts['steps'] or 'default'} steps, {len(facts['prompts'])} "
        f"prompt(s), seed {facts['seed']}. PSNR, SSIM, GMSD and LPIPS against the dense video of the same "
        "seed; cost of the sparse calls as a share of dense attention; speed-up of the whole generation; "
        "the error is what a method says of itself while it runs.",
        command=command,
        tables=[
            table(found.rows, "Quality and efficiency (the paper's Table 1)"),
            *physics_table({row.title: row.physics for row in found.rows}, find_method(OURS).title),
        ],
        pictures=runtime(found.rows),
        warnings=disturbed(found.rows),
        facts={
            **{f"not measured: {name}": reason for name, reason in found.not_measured.items()},
            **({DENSE_AGAIN: f"{MEANING}: no PSNR tells more"} if found.has_floor else {}),
            "prompts": "; ".join(facts["prompts"]),
            "machine": f"{hardware['cpu']}, {hardware['threads']} threads"
            + "".join(f", {gpu}" for gpu in hardware["gpus"]),
            "methods of others": "PyTorch code of this project around the same attention backend: their "
            "times compare with each other, not with their authors' kernels",
            **sources,
        },
        data={
            "rows": [asdict(row) for row in found.rows],
            "model": facts["model"], "density": facts["density"], "versions": doctor.versions(),
            "machine": hardware,
        },
    )  # fmt: skip


def result_files(found: Measured, facts: Mapping[str, Any], command: str) -> dict[str, bytes]:
    """The report, and the frames of every method one below the other."""
    pixels = {name: to_pixels(frames) for name, frames in found.clips.items()}
    made = make_report(found, facts, command).files()
    return {**made, "frames.png": encode_png(contact_sheet(pixels))}

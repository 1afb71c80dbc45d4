"""Runs several methods on a whole model: every prompt dense, then with each method."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ....baselines.methods import find_method
from ....errors import InputError
from ....hosts import Settings
from ....util.json_text import is_finite
from ...metrics.physics import PhysicsRow
from ...metrics.vbench import DIMENSIONS, installed, vbench_clip
from ...metrics.video_quality import Lpips
from ..averages import dense_figures, mean, mean_floor, sparse_figures
from ..compare import Watch, against, dense_baseline
from ..comparison import Baseline, Comparison
from ..floor import NAME as DENSE_AGAIN
from ..run import Request
from ..videos import encode_mp4, to_pixels

DENSE = "dense"
METHODS = ("sparge", "svg2", "svoo", "svg-ear", "paper", "anchored")
FPS = 16  # of the clips that VBench scores
MAX_SCORE_BYTES = 1 << 20
NO_PBENCH = "PBench was not measured: it is not run here; give its scores with --pbench"
# The parts of a bar in the runtime figure, from the bottom; stages have the names that receipts use.
PARTS = {
    "rest of the model": "rest of the model",
    "dense": "attention that stays dense",
    "attention": "attention pairs",
    "grouping": "grouping",
    "routing": "routing",
    "summary": "summary",
    "probes": "probes",
    "reconstruction": "reconstruction",
    "exact rows": "text rows",
    "layout": "layout and receipts",
}


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
    settings: Mapping[str, Settings],
    lpips: Lpips | str,
    watch: Watch,
    *,
    time_stages: bool,
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
        time_stages: Whether stages are timed; on CUDA that makes the calls slower.
        device: Where VBench runs.
        pbench: PBench scores by method, if the user has them.
        floor: Whether dense runs once more, to measure how far two dense runs are apart.
    """
    first = next(iter(settings.values()))
    baselines = [
        dense_baseline(pipe, request, first, watch, split=True, floor=floor, lpips=lpips) for request in requests
    ]
    missing: dict[str, str] = {} if pbench else {"PBench": NO_PBENCH}
    clips = {DENSE: baselines[0].timed.clip.frames}
    rows: list[MethodRow] = []
    for name, asked in settings.items():
        found = [
            against(pipe, model, request, asked, dense, lpips=lpips, steps=watch(name), time_stages=time_stages)
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
    clips: Sequence[np.ndarray], method: str, device: str, pbench: Mapping[str, float] | None, missing: dict[str, str]
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
        dense,
        method=DENSE_AGAIN,
        title=f"{DENSE_AGAIN} (the floor)",
        speedup=None,
        cpu_speedup=None,
        scores={},
        parts={},
        physics=None,
        **floor,
    )
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

"""Generates the same clip dense and sparse, and compares the two."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ...hosts import Report, Settings
from ...hosts.diffusers import accelerate
from ...hosts.diffusers.accelerate import accelerate_with
from ..capture.recording import dense_on_purpose
from ..metrics.physics import run_physics
from ..metrics.video_quality import Lpips, VideoQuality, quality
from .comparison import Baseline, Comparison, Timed
from .flops import counted_passes
from .noise_floor import NAME as DENSE_AGAIN
from .noise_floor import another_order
from .run import Clip, Progress, Request, generate

WARM_UP_STEPS = 1  # first calls pay for allocation, threads and lazy imports
Watch = Callable[[str], Progress]  # from the name of a run to the function that receives its steps


@dataclass(frozen=True)
class ClipRun:
    """One generation and what its attention calls did; `report` is None for dense attention."""

    clip: Clip
    report: Report | None
    passes: int  # forward passes of the transformers


def generate_once(
    pipe: Any,
    request: Request,
    settings: Settings | None = None,
    progress: Progress | None = None,
    *,
    time_stages: bool = False,
    reordered: bool = False,
) -> ClipRun:
    """Runs the pipeline once.

    Args:
        pipe: The pipeline, not accelerated.
        request: What to generate.
        settings: How it is accelerated; None: dense.
        progress: Called after every step.
        time_stages: Whether the stages of sparse calls are timed.
        reordered: Whether dense attention sums in another order (`noise_floor.another_order`).

    Returns:
        The clip, its time, and what the attention calls did.
    """
    if settings is None:
        order: AbstractContextManager[None] = another_order(pipe) if reordered else nullcontext()
        with order, counted_passes(pipe) as passes:
            return ClipRun(generate(pipe, request, progress), None, passes.count)
    with accelerate_with(pipe, settings, time_stages=time_stages) as handle, counted_passes(pipe) as passes:
        return ClipRun(generate(pipe, request, progress), handle.report(), passes.count)


def compare(
    pipe: Any,
    model: str,
    request: Request,
    settings: Settings,
    *,
    lpips: Lpips | str,
    watch: Watch,
    dense: bool = True,
    repeats: int = 1,
    time_stages: bool = True,
    noise_floor: bool = False,
) -> Comparison:
    """Generates dense and sparse in turn, `repeats` times, after a short untimed pass of each. With `noise_floor`
    it runs dense once more, to measure how far two dense runs are apart."""
    linear_flops = warm_up(pipe, request, settings, watch) if dense else None
    dense_runs, sparse_runs = [], []
    for _ in range(repeats):
        if dense:
            dense_runs.append(generate(pipe, request, watch("dense")))
        sparse_runs.append(generate_once(pipe, request, settings, watch("sparse"), time_stages=time_stages))
    baseline = None
    if dense:
        again = measure_noise_floor(pipe, request, dense_runs[-1], lpips, watch(DENSE_AGAIN)) if noise_floor else None
        baseline = Baseline(Timed.of(dense_runs), linear_flops, noise_floor=again)
    return _compared(pipe, model, request, settings, sparse_runs, baseline, lpips)


def compare_with(
    baseline: Baseline,
    pipe: Any,
    model: str,
    request: Request,
    settings: Settings,
    *,
    lpips: Lpips | str,
    progress: Progress,
    time_stages: bool = False,
) -> Comparison:
    """One more sparse generation, compared with a dense one that exists already."""
    run = generate_once(pipe, request, settings, progress, time_stages=time_stages)
    return _compared(pipe, model, request, settings, [run], baseline, lpips)


def dense_baseline(
    pipe: Any,
    request: Request,
    settings: Settings,
    watch: Watch,
    *,
    split: bool = False,
    noise_floor: bool = False,
    lpips: Lpips | str = "not asked for",
) -> Baseline:
    """The dense clip. `split` also measures which part of its time is attention, in one more step; `noise_floor`
    runs it once more to measure how far two dense clips are apart."""
    linear_flops = warm_up(pipe, request, settings, watch)
    attention = _attention_share(pipe, request, watch) if split else None
    run = generate(pipe, request, watch("dense"))
    again = measure_noise_floor(pipe, request, run, lpips, watch(DENSE_AGAIN)) if noise_floor else None
    return Baseline(Timed.of([run]), linear_flops, attention, again)


def measure_noise_floor(
    pipe: Any, request: Request, dense: Clip, lpips: Lpips | str, progress: Progress | None = None
) -> VideoQuality:
    """Runs dense once more, with attention summed in another order, and compares it with the first run.

    Args:
        pipe: The pipeline, not accelerated.
        request: What `dense` was generated from.
        dense: The first run.
        lpips: A network, or the reason why there is none.
        progress: Called after every step.

    Returns:
        PSNR, SSIM, GMSD and LPIPS of the second run against the first. Runs that do not differ in a single bit have
        no PSNR; `not_measured` says so.
    """
    again = generate_once(pipe, request, None, progress, reordered=True)
    return quality(again.clip.frames, dense.frames, lpips)


def _attention_share(pipe: Any, request: Request, watch: Watch) -> float | None:
    """Share of self-attention in the time of a dense step: every call stays dense and is timed."""
    with dense_on_purpose(), accelerate(pipe, dense_steps=0, dense_layers=1.0, min_tokens=0) as handle:
        run = generate(pipe, replace(request, steps=WARM_UP_STEPS), watch("dense, attention timed"))
        seconds = handle.report().total.dense_seconds
    return min(1.0, seconds / run.seconds) if run.seconds > 0 else None


def warm_up(pipe: Any, request: Request, settings: Settings, watch: Watch) -> int | None:
    """One step of each kind at full size, so that neither is slower for being first. Returns the FLOPs of a
    forward pass outside attention."""
    short = replace(request, steps=WARM_UP_STEPS)
    with counted_passes(pipe, with_flops=True) as passes:
        generate(pipe, short, watch("warm-up, dense"))
    at_once = replace(settings, dense_steps=0, dense_layers=0)
    with accelerate_with(pipe, at_once):
        generate(pipe, short, watch("warm-up, sparse"))
    return passes.linear_flops


def _compared(
    pipe: Any,
    model: str,
    request: Request,
    settings: Settings,
    runs: Sequence[ClipRun],
    dense: Baseline | None,
    lpips: Lpips | str,
) -> Comparison:
    """The times of all sparse runs, and the clip of the last against the dense one."""
    sparse, last = Timed.of([run.clip for run in runs]), runs[-1]
    clip = None if dense is None else dense.timed.clip.frames
    found = VideoQuality.nothing("there is no dense video to compare with")
    if clip is not None:
        found = quality(sparse.clip.frames, clip, lpips)
    physics = run_physics(pipe, request, sparse.clip.frames, clip)
    assert last.report is not None
    return Comparison(model, request, settings, sparse, dense, last.passes, last.report, found, physics)

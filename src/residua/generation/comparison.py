"""The same clip generated dense and sparse: times, differences, and what was skipped."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import doctor
from ..diffusers import Report, accelerate
from ..lab.recording import dense_on_purpose
from ..lab.video_quality import Lpips, VideoQuality, quality
from .floor import NAME as DENSE_AGAIN
from .floor import measure_floor
from .flops import counted_passes
from .physics import RunPhysics, run_physics
from .run import Generation, Progress, Request, generate
from .sparsity import Sparsity

WARM_UP_STEPS = 1  # first calls pay for allocation, threads and lazy imports
Watch = Callable[[str], Progress]  # from the name of a run to the function that receives its steps


@dataclass(frozen=True)
class Timed:
    """One way to generate the clip, perhaps several times; the median time counts."""

    clip: Generation
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    waited: tuple[float | None, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cpu_median(self) -> float:
        return statistics.median(self.cpu_seconds)


@dataclass(frozen=True)
class Baseline:
    """The dense clip, and the FLOPs of the transformer outside self-attention."""

    timed: Timed
    linear_flops: int | None  # per forward pass
    attention_share: float | None = None  # attention's share of the time of a dense step; None: not measured
    floor: VideoQuality | None = None  # a second dense clip against the first (`floor.py`)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. `dense` is None if only the sparse clip was generated."""

    model: str
    request: Request
    sparsity: Sparsity
    sparse: Timed
    dense: Baseline | None
    passes: int  # forward passes of the transformers in one generation
    report: Report
    quality: VideoQuality
    physics: RunPhysics | None = None  # None: not a clip of the model in the box
    vbench: dict[str, Any] | str = "not asked for: residua generate --vbench runs it"  # or a reason

    @property
    def speedup(self) -> float | None:
        return None if self.dense is None else self.dense.timed.median / self.sparse.median

    @property
    def cpu_speedup(self) -> float | None:
        """Speed-up in processor time, on a CPU; other work on the machine distorts it little."""
        if self.dense is None or self.on_gpu:
            return None
        return self.dense.timed.cpu_median / self.sparse.cpu_median

    @property
    def waiting(self) -> float | None:
        """Share of the timed seconds in which this process was ready to run and other work had the core; None
        where the system does not report it."""
        timed = [self.sparse] if self.dense is None else [self.sparse, self.dense.timed]
        waited = [seconds for one in timed for seconds in one.waited if seconds is not None]
        if len(waited) < sum(len(one.waited) for one in timed):
            return None
        return sum(waited) / sum(sum(one.seconds) for one in timed)

    @property
    def floor(self) -> VideoQuality | None:
        """How far two dense runs are apart; a PSNR above that means nothing more. None: not measured."""
        return None if self.dense is None else self.dense.floor

    @property
    def on_gpu(self) -> bool:
        return "CUDA" in self.report.timed_by

    @property
    def density(self) -> float | None:
        """Realised share of the pairs in the sparse calls."""
        return self.report.total.density

    @property
    def cost(self) -> float | None:
        """Cost of the sparse calls as a share of dense attention: pairs and all other work."""
        return self.report.total.cost

    @property
    def not_measured(self) -> dict[str, str]:
        """Every metric without a value, and why."""
        scores = {"vbench": self.vbench} if isinstance(self.vbench, str) else {}
        return {**self.quality.not_measured, **scores}

    @property
    def all_dense(self) -> str | None:
        """Why nothing was sparse, or None if something was."""
        total = self.report.total
        if total.sparse:
            return None
        reasons = sorted(total.dense, key=lambda reason: -total.dense[reason])
        settings = [transformer.settings for transformer in self.report.transformers]
        least = max((found["min_tokens"] for found in settings), default=0)
        if 0 < self.tokens < least:
            return f"{self.tokens:,} tokens < min_tokens {least:,}: all dense"
        return f"all dense: {', '.join(reasons) or 'no attention call was seen'}"

    @property
    def tokens(self) -> int:
        grids = [grid for transformer in self.report.transformers for grid in transformer.grids]
        return max((t * h * w for t, h, w in grids), default=0)

    def attention_flops(self, dense: bool) -> int:
        """FLOPs of self-attention in one generation."""
        total = self.report.total
        head_dim = total.shapes[0]["q"][-1] if total.shapes else 0
        if dense:
            return 4 * head_dim * (total.pairs.get("possible", 0) + total.dense_pairs)
        return total.flops + 4 * head_dim * total.dense_pairs

    def pflops(self, dense: bool) -> float | None:
        """PFLOPs of the transformers in one generation: self-attention, matrix products, convolutions."""
        if self.dense is None or self.dense.linear_flops is None:
            return None
        return (self.attention_flops(dense) + self.passes * self.dense.linear_flops) / 1e15

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        total = self.report.total
        layers = [layer for transformer in self.report.transformers for layer in transformer.layers]
        height, width = self.sparse.clip.frames.shape[1:3]
        return {
            "speedup": self.speedup,
            "cpu_speedup": self.cpu_speedup,
            **self.quality.to_dict(),
            "floor": None if self.floor is None else self.floor.to_dict(),
            **({} if self.physics is None else {"physics": self.physics.to_dict()}),
            "vbench": None if isinstance(self.vbench, str) else self.vbench,
            "not_measured": self.not_measured,
            "quality": self.sparsity.quality,
            "all_dense": self.all_dense,
            "cost": self.cost,
            "density": self.density,
            "density_with_dense": total.density_with_dense,
            "error": total.error,
            "chosen": total.chosen,
            "dense_heads": total.dense_heads,
            "layers": [layer.name for layer in layers],
            "cost_per_layer": [layer.cost for layer in layers],
            "density_per_layer": [layer.density for layer in layers],
            "error_per_layer": [layer.error for layer in layers],
            "chosen_per_layer": [layer.chosen for layer in layers],
            "seconds_per_layer": [layer.seconds for layer in layers],
            "sparse_calls_per_layer": [layer.sparse for layer in layers],
            "dense_calls_per_layer": [layer.dense_calls for layer in layers],
            "stage_seconds": total.stages,
            "attention_seconds": total.seconds,
            "dense_seconds": None if self.dense is None else self.dense.timed.median,
            "sparse_seconds": self.sparse.median,
            "dense_cpu_seconds": None if self.dense is None else self.dense.timed.cpu_median,
            "sparse_cpu_seconds": self.sparse.cpu_median,
            "dense_runs": None if self.dense is None else list(self.dense.timed.seconds),
            "sparse_runs": list(self.sparse.seconds),
            "dense_step_seconds": None if self.dense is None else self.dense.timed.clip.step_seconds,
            "sparse_step_seconds": self.sparse.clip.step_seconds,
            "waiting": self.waiting,
            "dense_pflops": self.pflops(dense=True),
            "sparse_pflops": self.pflops(dense=False),
            "model": self.model,
            "prompt": self.request.prompt,
            "seed": self.request.seed,
            "steps": self.request.steps,
            "frames": len(self.sparse.clip.frames),
            "height": height,
            "width": width,
            "tokens": self.tokens,
            "backends": total.backends,
            "settings": [transformer.settings for transformer in self.report.transformers],
            "notes": [*total.notes, *self.report.notes],
            "versions": doctor.versions(),
            "machine": machine(),
        }


def compare(
    pipe: Any,
    model: str,
    request: Request,
    sparsity: Sparsity,
    *,
    lpips: Lpips | str,
    watch: Watch,
    dense: bool = True,
    repeats: int = 1,
    profile: bool = True,
    floor: bool = False,
) -> Comparison:
    """Generates dense and sparse in turn, `repeats` times, after a short untimed pass of each. With `floor`
    it runs dense once more, to measure how far two dense runs are apart."""
    linear_flops = warm_up(pipe, request, sparsity, watch) if dense else None
    dense_runs, sparse_runs = [], []
    for _ in range(repeats):
        if dense:
            dense_runs.append(generate(pipe, request, watch("dense")))
        with sparsity.accelerate(pipe, profile) as handle, counted_passes(pipe) as passes:
            sparse_runs.append(generate(pipe, request, watch("sparse")))
            report = handle.report()
    baseline = None
    if dense:
        again = _floor(pipe, request, dense_runs[-1], lpips, watch) if floor else None
        baseline = Baseline(_timed(dense_runs), linear_flops, floor=again)
    sparse = _timed(sparse_runs)
    return _compared(pipe, model, request, sparsity, sparse, baseline, passes.count, report, lpips)


def against(
    pipe: Any,
    model: str,
    request: Request,
    sparsity: Sparsity,
    baseline: Baseline,
    *,
    lpips: Lpips | str,
    steps: Progress,
    profile: bool = False,
) -> Comparison:
    """One more sparse generation, compared with a dense one that exists already."""
    with sparsity.accelerate(pipe, profile=profile) as handle, counted_passes(pipe) as passes:
        run = generate(pipe, request, steps)
        report = handle.report()
    return _compared(pipe, model, request, sparsity, _timed([run]), baseline, passes.count, report, lpips)


def dense_baseline(
    pipe: Any,
    request: Request,
    sparsity: Sparsity,
    watch: Watch,
    *,
    split: bool = False,
    floor: bool = False,
    lpips: Lpips | str = "not asked for",
) -> Baseline:
    """The dense clip. `split` also measures which part of its time is attention, in one more step; `floor`
    runs it once more to measure how far two dense clips are apart."""
    linear_flops = warm_up(pipe, request, sparsity, watch)
    attention = _attention_share(pipe, request, watch) if split else None
    run = generate(pipe, request, watch("dense"))
    again = _floor(pipe, request, run, lpips, watch) if floor else None
    return Baseline(_timed([run]), linear_flops, attention, again)


def _floor(pipe: Any, request: Request, dense: Generation, lpips: Lpips | str, watch: Watch) -> VideoQuality:
    return measure_floor(pipe, request, dense.frames, lpips, watch(DENSE_AGAIN))


def _attention_share(pipe: Any, request: Request, watch: Watch) -> float | None:
    """Share of self-attention in the time of a dense step: every call stays dense and is timed."""
    with dense_on_purpose(), accelerate(pipe, dense_steps=0, dense_layers=1.0, min_tokens=0) as handle:
        run = generate(pipe, replace(request, steps=WARM_UP_STEPS), watch("dense, attention timed"))
        seconds = handle.report().total.dense_seconds
    return min(1.0, seconds / run.seconds) if run.seconds > 0 else None


def warm_up(pipe: Any, request: Request, sparsity: Sparsity, watch: Watch) -> int | None:
    """One step of each kind at full size, so that neither is slower for being first. Returns the FLOPs of a
    forward pass outside attention."""
    short = replace(request, steps=WARM_UP_STEPS)
    with counted_passes(pipe, with_flops=True) as passes:
        generate(pipe, short, watch("warm-up, dense"))
    at_once = replace(sparsity, dense_steps=0, dense_layers=0)
    with at_once.accelerate(pipe, profile=False):
        generate(pipe, short, watch("warm-up, sparse"))
    return passes.linear_flops


def _compared(
    pipe: Any,
    model: str,
    request: Request,
    sparsity: Sparsity,
    sparse: Timed,
    dense: Baseline | None,
    passes: int,
    report: Report,
    lpips: Lpips | str,
) -> Comparison:
    found = VideoQuality.nothing("there is no dense video to compare with")
    if dense is not None:
        found = quality(sparse.clip.frames, dense.timed.clip.frames, lpips)
    clip = None if dense is None else dense.timed.clip.frames
    physics = run_physics(pipe, request, sparse.clip.frames, clip)
    return Comparison(model, request, sparsity, sparse, dense, passes, report, found, physics)


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": doctor.cpu()["model"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": doctor.gpus(),
        # Load of the last minute, this process included; `Comparison.waiting` says what others took.
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _timed(runs: list[Generation]) -> Timed:
    return Timed(
        runs[-1],
        tuple(run.seconds for run in runs),
        tuple(run.cpu_seconds for run in runs),
        tuple(run.waited for run in runs),
    )

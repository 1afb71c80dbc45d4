"""The same clip generated dense and sparse: who was faster, how far apart they are, what was skipped."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import doctor
from ..config import Config
from ..diffusers import Handle, Report, accelerate, preset_config
from ..integration import find_quality
from ..lab.recording import dense_on_purpose
from ..lab.video_quality import METRICS, Lpips, VideoQuality, quality
from ..methods import find_method
from .floor import NAME as DENSE_AGAIN
from .floor import measure_floor
from .flops import counted_passes
from .physics import RunPhysics, run_physics
from .run import Generation, Progress, Request, generate

WARM_UP_STEPS = 1  # first calls pay for allocation, threads and lazy imports
Watch = Callable[[str], Progress]  # a name for what runs -> where its steps go


@dataclass(frozen=True)
class Sparsity:
    """How a pipeline is accelerated; None takes the preset of the model family."""

    config: Config | None = None
    density: float | None = None  # goes over the config's, as the next two
    dense_steps: float | None = None
    dense_layers: float | None = None
    min_tokens: int | None = None
    max_error: float | None = None
    reconstruction: str | None = None
    quality: str | None = None  # instead of a config and of what goes over it
    method: str | None = None  # who answers the sparse calls; None: Residua, as the config says

    def __post_init__(self) -> None:
        """Refused now, not after a model is loaded."""
        if self.quality is not None:
            find_quality(self.quality)
        config = (self.config or Config()).replace(**self._changes)
        if self.method is not None:
            find_method(self.method).settings(config)

    @property
    def _changes(self) -> dict[str, Any]:
        given = {"density": self.density, "max_error": self.max_error, "reconstruction": self.reconstruction}
        return {name: value for name, value in given.items() if value is not None}

    def accelerate(self, pipe: Any, profile: bool) -> Handle:
        config = self.config
        if self._changes:
            config = (config or preset_config(pipe)).replace(**self._changes)
        return accelerate(
            pipe,
            quality=self.quality,  # type: ignore[arg-type]
            config=config,
            method=self.method,
            dense_steps=self.dense_steps,
            dense_layers=self.dense_layers,
            min_tokens=self.min_tokens,
            time_stages=profile,
        )


@dataclass(frozen=True)
class Timed:
    """One way to generate the clip, perhaps several times; the median counts."""

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
    """The dense clip, and what the transformer costs beside self-attention."""

    timed: Timed
    linear_flops: int | None  # per forward pass
    attention_share: float | None = None  # of the time of a dense step; None: not measured
    floor: VideoQuality | None = None  # a second dense clip against it (`floor.py`); None: not measured


@dataclass(frozen=True)
class Comparison:
    """`dense` is None if only the sparse clip was generated."""

    model: str
    request: Request
    sparsity: Sparsity
    sparse: Timed
    dense: Baseline | None
    passes: int  # forward passes of the transformers in one generation
    report: Report
    quality: VideoQuality
    physics: RunPhysics | None = None  # None: not a clip of the model in the box
    vbench: dict[str, Any] | str = "not asked for: residua generate --vbench runs it"  # or why not

    @property
    def speedup(self) -> float | None:
        return None if self.dense is None else self.dense.timed.median / self.sparse.median

    @property
    def cpu_speedup(self) -> float | None:
        """In processor time, on a CPU: what a busy machine cannot distort much."""
        if self.dense is None or self.on_gpu:
            return None
        return self.dense.timed.cpu_median / self.sparse.cpu_median

    @property
    def waiting(self) -> float | None:
        """Share of the timed seconds in which other work had the core that this process was ready to use;
        None where the system does not tell."""
        timed = [self.sparse] if self.dense is None else [self.sparse, self.dense.timed]
        waited = [seconds for one in timed for seconds in one.waited if seconds is not None]
        if len(waited) < sum(len(one.waited) for one in timed):
            return None
        return sum(waited) / sum(sum(one.seconds) for one in timed)

    @property
    def floor(self) -> VideoQuality | None:
        """How far two dense runs are apart: what a PSNR can tell at best. None: not measured."""
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
        """Of the sparse calls as a share of dense attention: pairs, and everything beside them."""
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
        """Of self-attention in one generation."""
        total = self.report.total
        head_dim = total.shapes[0]["q"][-1] if total.shapes else 0
        if dense:
            return 4 * head_dim * (total.pairs.get("possible", 0) + total.dense_pairs)
        return total.flops + 4 * head_dim * total.dense_pairs

    def pflops(self, dense: bool) -> float | None:
        """Of the transformers in one generation: self-attention, matrix products, convolutions."""
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
    """Dense and sparse in turn, `repeats` times, after a short pass of each that nobody times; `floor` runs
    dense once more, to say how much a PSNR can tell."""
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
    """One more sparse generation against a dense one that exists already."""
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
    """The dense clip. `split` also finds which part of its time is attention, from one more step; `floor`
    runs it once more to find how far two dense clips are apart."""
    linear_flops = warm_up(pipe, request, sparsity, watch)
    attention = _attention_share(pipe, request, watch) if split else None
    run = generate(pipe, request, watch("dense"))
    again = _floor(pipe, request, run, lpips, watch) if floor else None
    return Baseline(_timed([run]), linear_flops, attention, again)


def _floor(pipe: Any, request: Request, dense: Generation, lpips: Lpips | str, watch: Watch) -> VideoQuality:
    return measure_floor(pipe, request, dense.frames, lpips, watch(DENSE_AGAIN))


def _attention_share(pipe: Any, request: Request, watch: Watch) -> float | None:
    """How much of a dense step is self-attention: every call stays dense, and is timed."""
    with dense_on_purpose(), accelerate(pipe, dense_steps=0, dense_layers=1.0, min_tokens=0) as handle:
        run = generate(pipe, replace(request, steps=WARM_UP_STEPS), watch("dense, attention timed"))
        seconds = handle.report().total.dense_seconds
    return min(1.0, seconds / run.seconds) if run.seconds > 0 else None


def warm_up(pipe: Any, request: Request, sparsity: Sparsity, watch: Watch) -> int | None:
    """A step of each kind at full size, so that neither pays for being first. Returns the FLOPs of a forward
    pass beside attention."""
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


def mean(values: Sequence[float | None]) -> float | None:
    """Over the prompts; None if one is missing, because a mean over other prompts is not comparable."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def mean_floor(baselines: Sequence[Baseline]) -> dict[str, Any] | None:
    """PSNR, SSIM, GMSD and LPIPS of the second dense runs, over the prompts; None if there were none."""
    floors = [one.floor for one in baselines if one.floor is not None]
    if not floors:
        return None
    return {name: mean([getattr(one, name) for one in floors]) for name in METRICS}


def machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": doctor.cpu()["model"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": doctor.gpus(),
        # Of the last minute, this process included; `Comparison.waiting` tells what others took.
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _timed(runs: list[Generation]) -> Timed:
    return Timed(
        runs[-1],
        tuple(run.seconds for run in runs),
        tuple(run.cpu_seconds for run in runs),
        tuple(run.waited for run in runs),
    )

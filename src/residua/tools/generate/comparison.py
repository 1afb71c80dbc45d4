"""What a comparison found: a clip made dense and sparse, times, differences, what was skipped."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...hosts import Report, Settings
from .. import doctor
from ..metrics.physics import RunPhysics
from ..metrics.video_quality import VideoQuality
from .run import Clip, Request


@dataclass(frozen=True)
class Timed:
    """One way to generate the clip, perhaps several times; the median time counts."""

    clip: Clip
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    waited: tuple[float | None, ...]

    @classmethod
    def of(cls, runs: Sequence[Clip]) -> Timed:
        """The times of all runs, and the clip of the last."""
        return cls(
            runs[-1],
            tuple(run.seconds for run in runs),
            tuple(run.cpu_seconds for run in runs),
            tuple(run.waited for run in runs),
        )

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
    noise_floor: VideoQuality | None = None  # a second dense clip against the first (`noise_floor.py`)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. `dense` is None if only the sparse clip was generated."""

    model: str
    request: Request
    settings: Settings
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
    def noise_floor(self) -> VideoQuality | None:
        """How far two dense runs are apart; a PSNR above that means nothing more. None: not measured."""
        return None if self.dense is None else self.dense.noise_floor

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
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the sparse generation: stages, dense calls, layout, the rest of the model; empty
        if stages were not timed."""
        total = self.report.total
        if not total.stages:
            return {}
        return {
            **total.stages,
            "dense": total.dense_seconds,
            "layout": max(0.0, total.sparse_seconds - sum(total.stages.values())),
            "rest of the model": max(0.0, self.sparse.clip.seconds - total.seconds),
        }

    @property
    def all_dense(self) -> str | None:
        """Why nothing was sparse, or None if something was."""
        return why_all_dense(self.report)

    @property
    def headline(self) -> str:
        """The result in a few words. A speed-up is named only if processor time confirms it: other work on
        the machine may have slowed down one of the two."""
        if self.all_dense is not None:
            return f"Nothing was sparse: {self.all_dense}"
        if self.speedup is None:
            return "A video with sparse attention"
        confirmed = self.cpu_speedup is None or abs(self.speedup / self.cpu_speedup - 1) < 0.25
        if self.speedup > 1 and confirmed:
            return f"Sparse attention, {self.speedup:.2f} times as fast"
        return "Dense and sparse, side by side"

    @property
    def tokens(self) -> int:
        return video_tokens(self.report)

    def attention_flops(self, dense: bool) -> int:
        """FLOPs of self-attention in one generation."""
        return attention_flops(self.report, dense)

    def pflops(self, dense: bool) -> float | None:
        """PFLOPs of the transformers in one generation."""
        linear = None if self.dense is None else self.dense.linear_flops
        return total_pflops(self.report, self.passes, linear, dense)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        total = self.report.total
        layers = [layer for transformer in self.report.transformers for layer in transformer.layers]
        height, width = self.sparse.clip.frames.shape[1:3]
        return {
            "speedup": self.speedup,
            "cpu_speedup": self.cpu_speedup,
            **self.quality.to_dict(),
            "floor": None if self.noise_floor is None else self.noise_floor.to_dict(),
            **({} if self.physics is None else {"physics": self.physics.to_dict()}),
            "vbench": None if isinstance(self.vbench, str) else self.vbench,
            "not_measured": self.not_measured,
            "quality": self.settings.quality,
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


def video_tokens(report: Report) -> int:
    """Tokens of the largest grid of the run."""
    grids = [grid for transformer in report.transformers for grid in transformer.grids]
    return max((t * h * w for t, h, w in grids), default=0)


def why_all_dense(report: Report) -> str | None:
    """Why nothing was sparse, or None if something was."""
    total, tokens = report.total, video_tokens(report)
    if total.sparse:
        return None
    reasons = sorted(total.dense, key=lambda reason: -total.dense[reason])
    minimum = max((transformer.settings["min_tokens"] for transformer in report.transformers), default=0)
    if 0 < tokens < minimum:
        return f"{tokens:,} tokens < min_tokens {minimum:,}: all dense"
    return f"all dense: {', '.join(reasons) or 'no attention call was seen'}"


def attention_flops(report: Report, dense: bool) -> int:
    """FLOPs of self-attention in one generation, as it ran or if it had been dense."""
    total = report.total
    head_dim = total.shapes[0]["q"][-1] if total.shapes else 0
    if dense:
        return 4 * head_dim * (total.pairs.get("possible", 0) + total.dense_pairs)
    return total.flops + 4 * head_dim * total.dense_pairs


def total_pflops(report: Report, passes: int, linear_flops: int | None, dense: bool) -> float | None:
    """PFLOPs of the transformers in one generation: self-attention, matrix products, convolutions; None if those
    outside attention are not known."""
    if linear_flops is None:
        return None
    return (attention_flops(report, dense) + passes * linear_flops) / 1e15


def machine() -> dict[str, Any]:
    """What the comparison ran on, as plain values."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": doctor.cpu()["model"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": doctor.gpus(),
        # Load of the last minute, this process included; `Comparison.waiting` says what others took.
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }

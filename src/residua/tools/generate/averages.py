"""Means over the prompts, as the tables of `tradeoff` and `method_table` show them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ..metrics.physics import mean_dense_physics, mean_physics
from ..metrics.video_quality import METRICS
from .comparison import Baseline, Comparison


def mean(values: Sequence[float | None]) -> float | None:
    """Mean over the prompts; None if one is missing, because a mean over other prompts is not comparable."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def sparse_figures(found: Sequence[Comparison]) -> dict[str, Any]:
    """The figures of one setting, by the names that rows of both tables have."""
    return {
        **{name: mean([getattr(one.quality, name) for one in found]) for name in METRICS},
        "density": mean([one.density for one in found]),
        "cost": mean([one.cost for one in found]),
        "error": mean([one.report.total.error for one in found]),
        "pflops": mean([one.pflops(dense=False) for one in found]),
        "speedup": mean([one.speedup for one in found]),
        "seconds": fmean(one.sparse.median for one in found),
        "physics": mean_physics([one.physics for one in found]),
    }


def dense_figures(found: Sequence[Comparison], baselines: Sequence[Baseline]) -> dict[str, Any]:
    """The same for dense attention, which has no distance from itself and no error."""
    return {
        **dict.fromkeys((*METRICS, "error")),
        "density": 1.0,
        "cost": 1.0,
        "pflops": mean([one.pflops(dense=True) for one in found]),
        "speedup": 1.0,
        "seconds": fmean(dense.timed.median for dense in baselines),
        "physics": mean_dense_physics([one.physics for one in found]),
    }


def mean_floor(baselines: Sequence[Baseline]) -> dict[str, Any] | None:
    """Mean PSNR, SSIM, GMSD and LPIPS of the second dense runs over the prompts; None if there were none."""
    floors = [one.floor for one in baselines if one.floor is not None]
    if not floors:
        return None
    return {name: mean([getattr(one, name) for one in floors]) for name in METRICS}

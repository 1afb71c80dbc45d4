"""The operator on video-like synthetic calls: dense time, sparse time, density and error, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import attention
from ..config import Config
from ..row_error import row_errors
from ..state import State
from ..synthetic import CONCENTRATIONS, VideoLike, grid_for, key_fraction, video_like

WARM_STEP = 0.05  # how far the second call drifts from the first, as from one denoising step to the next


@dataclass(frozen=True)
class DemoRow:
    """One call at one concentration."""

    concentration: str
    key_fraction: float  # share of the keys that hold 95 % of the mass
    tokens: int
    density: float
    dense_seconds: float
    cold_seconds: float
    warm_seconds: float
    mean_error: float  # relative row error against dense attention
    p99_error: float
    hard_drop_error: float  # the same pairs without reconstruction
    backend: str

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.warm_seconds


def demo_rows(tokens: int, heads: int, head_dim: int, config: Config, repeats: int = 3) -> Iterator[DemoRow]:
    """One row per concentration, each measured in turn."""
    for name, concentration in CONCENTRATIONS.items():
        recipe = VideoLike(grid_for(tokens), heads, head_dim, concentration)
        yield _measure(name, recipe, config, repeats)


def _measure(name: str, recipe: VideoLike, config: Config, repeats: int) -> DemoRow:
    state = State()
    before = video_like(recipe)
    cold, _ = _timed(lambda: attention(*before, config, state), 1)
    q, k, v = video_like(VideoLike(**{**recipe.__dict__, "step": WARM_STEP}))
    warm, sparse = _timed(lambda: attention(q, k, v, config, state), repeats)
    dense, reference = _timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), repeats)
    _, receipt = attention(q, k, v, config, state, return_receipt=True)
    mean, p99 = row_errors(sparse, reference)
    hard, _ = row_errors(attention(q, k, v, config.replace(reconstruction="none"), state), reference)
    return DemoRow(
        name, float(key_fraction(q, k).mean()), recipe.tokens, receipt.density, dense, cold, warm,
        mean, p99, hard, receipt.backend,
    )  # fmt: skip


def _timed(work: Callable[[], Tensor], repeats: int) -> tuple[float, Tensor]:
    """Median seconds, and the last result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2], result

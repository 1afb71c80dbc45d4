"""The call that a benchmark measures, and how it is timed."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import InputError
from ...receipt import Receipt
from ..synthetic import CONCENTRATIONS, VideoLike, grid_for, video_like

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS_AT_ONCE = 4


@dataclass(frozen=True)
class BenchCase:
    """A synthetic call, video-like heads of one concentration, and how often it is repeated."""

    tokens: int = 16384
    heads: int = 2
    head_dim: int = 128
    density: float = 0.22
    dtype: str = "fp32"
    concentration: str = "medium"
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype={self.dtype!r}: wanted one of {', '.join(DTYPES)}")
        if self.concentration not in CONCENTRATIONS:
            raise InputError(f"concentration={self.concentration!r}: wanted one of {', '.join(CONCENTRATIONS)}")
        for name in ("tokens", "heads", "head_dim", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: wanted at least 1")

    @property
    def recipe(self) -> VideoLike:
        return VideoLike(grid_for(self.tokens), self.heads, self.head_dim, CONCENTRATIONS[self.concentration])

    def tensors(self, device: torch.device) -> list[Tensor]:
        """q, k and v on the device, generated a few heads at a time."""
        parts = []
        for first in range(0, self.heads, HEADS_AT_ONCE):
            some = replace(self.recipe, heads=min(HEADS_AT_ONCE, self.heads - first), seed=first)
            parts.append([x.to(device) for x in video_like(some, DTYPES[self.dtype])])
        return [torch.cat(same, dim=1) for same in zip(*parts, strict=True)]


def milliseconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of `work` after one run to warm up, which also compiles its kernels; once alone is cold."""
    if repeats > 1:
        work()
    times = []
    for _ in range(repeats):
        start = _now(device)
        work()
        times.append(_now(device) - start)
    return 1e3 * statistics.median(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_stages_ms(receipts: Sequence[Receipt]) -> dict[str, float]:
    """Milliseconds of each stage, medians over calls of which each was timed."""
    seconds = [receipt.timings.seconds for receipt in receipts if receipt.timings is not None]
    return {name: 1e3 * statistics.median(one[name] for one in seconds) for name in seconds[0]}

"""Small questions that every launcher asks about sizes, dtypes and the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from .entry import interpreting

if interpreting():
    from .interpreter import widen_bf16_products

    widen_bf16_products()

WARP_GROUP_GPUS = (90, 100, 103)  # four warps multiply 64 rows together: wgmma, tcgen05
FRUGAL_GPUS = (100, 103)  # their assembler rather spills than takes registers for a pipeline of loads
NEWEST = 90  # the architecture that is assumed without a device to ask
FALLBACK_PROCESSORS = 108  # without a device to ask (interpreter, compile gate): an A100
_IMAGINED: ContextVar[int | None] = ContextVar("imagined architecture", default=None)


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work: tile sizes, warps, and stages of the load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Warps and stages, as a launch takes them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def cdiv(value: int, step: int) -> int:
    return -(-value // step)


def padded(dim: int) -> int:
    """The power of two that a tile uses for `dim` columns; a tensor core wants at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as a kernel reads it: contiguous, one byte per element."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def precision(dtype: torch.dtype, width: int) -> str:
    """How `tl.dot` multiplies fp32: three TF32 products keep its accuracy, plain TF32 would not. Above 128
    columns the split operands do not fit in the registers, and plain fp32 arithmetic is what is left."""
    return "tf32x3" if dtype == torch.float32 and width <= 128 else "ieee"


def architecture() -> int:
    """Compute capability of the GPU that kernels are compiled for now, as in sm_90. Without one (interpreter,
    tensors without memory) what an H100 would run is taken."""
    imagined = _IMAGINED.get()
    if imagined is not None:
        return imagined
    if interpreting():
        return NEWEST
    from triton.runtime import driver

    try:
        return int(driver.active.get_current_target().arch)
    except RuntimeError:  # Triton finds no driver
        return NEWEST


@contextmanager
def imagined_gpu(arch: int) -> Iterator[None]:
    """Inside, the launchers choose for sm_`arch`, whatever this machine has."""
    before = _IMAGINED.set(arch)
    try:
        yield
    finally:
        _IMAGINED.reset(before)


def processors(x: Tensor) -> int:
    """Streaming multiprocessors of the device that holds x; a property, read without a synchronisation."""
    if x.device.type != "cuda":
        return FALLBACK_PROCESSORS
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same logits with a scale above 0, which the kernels want: q takes over what is not."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)

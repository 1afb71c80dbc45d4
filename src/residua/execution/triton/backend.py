"""The backend that keeps a whole call on the GPU: every primitive a Triton kernel, nothing read back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import BackendError, ResiduaError
from ...types import Partition, Route, SummaryKeys
from ..backend import BACKENDS, Backend, Demand

MIN_CAPABILITY = (8, 0)


def interpreting() -> bool:
    """Whether Triton runs kernels as Python on CPU tensors: for tests, thousands of times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing_triton() -> str | None:
    """Why Triton kernels cannot run on this machine at all, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'residua[gpu]'"
    if not interpreting() and not torch.cuda.is_available():
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on CPU tensors, for tests only)"
    return None


@contextmanager
def explained(library: str, way_out: str) -> Iterator[None]:
    """Also a decorator. Libraries compile their kernels on first use; a failure must name the way out."""
    try:
        yield
    except (ResiduaError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Triton's errors are not importable without Triton, so they are told by where they come from
        if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("triton."):
            raise
        raise BackendError(f"{library} failed: {str(error).strip()}. Use backend={way_out!r}") from error


@BACKENDS.register
class TritonBackend(Backend):
    name: ClassVar[str] = "triton"
    about: ClassVar[str] = "Triton kernels for NVIDIA GPUs from sm_80, the whole call on the device"
    # the interpreter must be asked for by name: `auto` would make a call thousands of times slower
    priority: ClassVar[int] = -1 if interpreting() else 40
    deterministic: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...] | None] = ("cuda", "cpu") if interpreting() else ("cuda",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, int]] = (1, 256)

    def unavailable(self) -> str | None:
        return missing_triton()

    def reasons(self, demand: Demand) -> list[str]:
        found = super().reasons(demand)
        if found:
            return found
        if interpreting() and demand.dtype == torch.bfloat16:
            found.append(
                "dtype torch.bfloat16: Triton's interpreter multiplies it wrongly; use float16 or float32"
            )
        if demand.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(demand.device)
            if (major, minor) < MIN_CAPABILITY:
                found.append(f"sm_{major}{minor}: takes sm_80 and newer")
        return found

    # The kernels are imported when they are first used, so that `import residua` needs no Triton.

    @explained("Triton", "portable")
    def project(self, x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
        from .projection import project

        return project(x, factor, normalise)

    @explained("Triton", "portable")
    def kmeans_step(self, x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        from .kmeans import kmeans_step

        return kmeans_step(x, centres, valid)

    @explained("Triton", "portable")
    def gather_rows(self, x: Tensor, order: Tensor) -> Tensor:
        from .permute import gather_rows

        return gather_rows(x, order)

    @explained("Triton", "portable")
    def group_means(self, x: Tensor, partition: Partition) -> Tensor:
        from .segments import segment_means

        return segment_means(x, partition.order, partition.offsets)

    @explained("Triton", "portable")
    def cell_mass(self, anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
        from .mass import cell_mass

        return cell_mass(anchors, k, kv, scale)

    @explained("Triton", "portable")
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        scale: float,
        summary: SummaryKeys | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        from .attend import attend

        return attend(q, k, v, route, scale, summary, out_dtype)

    @explained("Triton", "portable")
    def slot_means(
        self, anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from .slots import slot_means

        return slot_means(anchors, k, v, kv, slots, log_mass, scale)

    @explained("Triton", "portable")
    def group_covariance(self, x: Tensor, v: Tensor, kv: Partition) -> tuple[Tensor, Tensor]:
        from .covariance import group_covariance

        return group_covariance(x, v, kv)

    @explained("Triton", "portable")
    def attend_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float
    ) -> Tensor:
        from .rows import attend_rows

        return attend_rows(rows, k, v, key_mask, scale)

    @explained("Triton", "portable")
    def add_affine(
        self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        from .affine import add_affine

        return add_affine(out, left, right, bias, dtype)

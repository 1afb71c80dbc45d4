"""What a backend is, and how one registers itself; `select.py` chooses one.

A backend runs the heavy primitives of a call. The base class is their contract and their version in plain
torch at once, by subject: for any device, without an [N, N] or an all-heads [N, C] matrix. A backend
overrides what it does better.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..registry import Registry
from ..types import Call
from .attention import AttentionPrimitives
from .grouping import CellPrimitives, GroupingPrimitives
from .judging import JudgingPrimitives
from .matrices import MatrixPrimitives
from .residual import ResidualPrimitives
from .summary import SummaryPrimitives

SUBJECTS = (
    MatrixPrimitives,
    GroupingPrimitives,
    CellPrimitives,
    SummaryPrimitives,
    AttentionPrimitives,
    JudgingPrimitives,
    ResidualPrimitives,
)
# What a backend may override: the public methods of the subjects. Their private ones are steps of these.
PRIMITIVES = tuple(name for subject in SUBJECTS for name in vars(subject) if not name.startswith("_"))


@dataclass(frozen=True)
class Demand:
    """What a call asks of a backend; enough to say no before anything is allocated."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int

    @staticmethod
    def of(call: Call) -> Demand:
        """What a call asks.

        Args:
            call: The call.

        Returns:
            Its device, dtype and head dims.
        """
        return Demand(call.q.device, call.q.dtype, call.q.shape[-1], call.v.shape[-1])


class Backend(SummaryPrimitives, CellPrimitives, AttentionPrimitives, JudgingPrimitives, ResidualPrimitives):
    """Base of the backends. All tensors share one device; outputs are fp32 unless a dtype is asked for.

    Groups and heads are leading dimensions everywhere: x [B, H, N, D] is any strided view with any of the
    backend's dtypes; partitions of keys have Hkv heads and serve H query heads, H a multiple of Hkv.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `residua doctor`
    preference: ClassVar[int] = 0  # `auto` tries higher ones first; below 0: only by name
    deterministic: ClassVar[bool] = True  # bit-identical on repeats
    adds_by_slot: ClassVar[bool] = False  # whether `slot_summary` is the fastest way to add a few rows by slot
    devices: ClassVar[tuple[str, ...] | None] = None  # torch device types; None = any
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    head_dims: ClassVar[tuple[int, int]] = (1, 1 << 30)  # inclusive, for D and Dv
    gpu_by_itself: ClassVar[bool] = True  # whether `auto` may choose it for tensors on a GPU

    def unavailable(self) -> str | None:
        """Why this backend cannot run on this machine at all, or None."""
        return None

    def reasons(self, demand: Demand) -> list[str]:
        """What speaks against running a call here.

        Args:
            demand: What the call asks.

        Returns:
            Every reason; empty means that it can run.
        """
        missing = self.unavailable()
        if missing:
            return [missing]
        found = []
        if self.devices is not None and demand.device.type not in self.devices:
            found.append(f"device {demand.device.type}: takes {', '.join(self.devices)}")
        if demand.dtype not in self.dtypes:
            found.append(f"dtype {demand.dtype}: takes {', '.join(map(str, self.dtypes))}")
        low, high = self.head_dims
        for label, dim in (("head_dim", demand.head_dim), ("value head_dim", demand.value_dim)):
            if not low <= dim <= high:
                found.append(f"{label}={dim}: takes {low}..{high}")
        return found

    def session(self) -> AbstractContextManager[Backend]:
        """Surrounds a whole call, and gives the backend that runs it: one that may keep what its stages share."""
        return nullcontext(self)

    def release(self) -> None:
        """Drops the rows that a session keeps, after the last stage that wants them."""


BACKENDS: Registry[Backend] = Registry("backend")


@BACKENDS.register
class TorchBackend(Backend):
    """The base class under a name."""

    name = "torch"
    about = "pure torch, any device and dtype"
    preference = 10
    gpu_by_itself = False  # Python loops that wait for the device

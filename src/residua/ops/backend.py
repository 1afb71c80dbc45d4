"""What a backend is, and how one registers itself; `selection.py` chooses one.

A backend runs the heavy primitives of a call, which `primitives/` describes by subject. The base class has
all of them but `attend` in plain torch, on any device, without an [N, N] or an all-heads [N, C] matrix; a
backend overrides what it does better.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..registry import Registry
from ..types import Call, Route, SummaryKeys
from .primitives import RoutingPrimitives, RowPrimitives, SummaryPrimitives


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


class Backend(SummaryPrimitives, RoutingPrimitives, RowPrimitives):
    """Base of the backends. All tensors share one device; outputs are fp32 unless a dtype is asked for.

    Groups and heads are leading dimensions everywhere: x [B, H, N, D] is any strided view with any of the
    backend's dtypes; partitions of keys have Hkv heads and serve H query heads, H a multiple of Hkv.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `residua doctor`
    preference: ClassVar[int] = 0  # `auto` tries higher ones first; below 0: only by name
    deterministic: ClassVar[bool] = True  # bit-identical on repeats
    adds_by_slot: ClassVar[bool] = False  # whether `slot_means` is the fastest way to add a few rows by slot
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

    def session(self) -> AbstractContextManager[None]:
        """Surrounds a whole call, for what a backend sets up and puts back around it."""
        return nullcontext()

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
        """Softmax attention of every row over the kept cells of its query group, and over its summary keys,
        which may drift (see `types.Drift`).

        Args:
            q: [B, H, Nq, D].
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            route: The kept cells.
            scale: Factor of the scores.
            summary: What stands for the skipped groups; None: nothing.
            out_dtype: Of the output; None: q's.

        Returns:
            The output [B, H, Nq, Dv] in the original row order, and the natural log-sum-exp [B, H, Nq] fp32.
            A row of no group or with nothing kept gets 0 and -inf.
        """
        raise NotImplementedError


BACKENDS: Registry[Backend] = Registry("backend")

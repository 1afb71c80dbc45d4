"""Backends: each registers itself here, says why it cannot take a call, and never falls back in silence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import judge
from ..types import ExtraKeys, Route
from . import flashinfer, native, portable, reference, triton
from .backend import Backend, Demand, backends, register, select
from .check import check_extra, check_route

__all__ = [
    "Backend",
    "Demand",
    "backends",
    "flashinfer",
    "native",
    "portable",
    "reference",
    "register",
    "run",
    "select",
    "triton",
]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Route,
    *,
    backend: str = "auto",
    scale: float | None = None,
    extra: ExtraKeys | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The raw operator: attention over the kept cells of a given route, nothing else.

    -> out [B, H, Nq, Dv], natural log-sum-exp [B, H, Nq] fp32. A row with nothing kept gets 0 and -inf. The
    route is checked first; a contradiction raises PlanError and computes nothing.
    """
    call = judge(q, k, v, scale=scale)
    check_route(route, call)
    check_extra(extra, route, call)
    chosen = select(backend, Demand.of(call))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return chosen.attend(q, k, v, route, call.scale, extra, out_dtype)

"""Backends: each registers here, gives reasons if it cannot take a call, and never falls back silently."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import validate
from ..types import Route, SummaryKeys
from . import flashinfer, native, portable, reference, triton
from .backend import BACKENDS, Backend, Demand
from .check import check_route, check_summary
from .selection import backends, choose_backend, slow_note

__all__ = [
    "BACKENDS",
    "Backend",
    "Demand",
    "backends",
    "choose_backend",
    "flashinfer",
    "native",
    "portable",
    "reference",
    "run",
    "slow_note",
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
    summary: SummaryKeys | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The raw operator: attention over the kept cells of a given route, nothing else.

    Args:
        q: [B, H, Nq, D].
        k: [B, Hkv, Nk, D].
        v: [B, Hkv, Nk, Dv].
        route: Which cells are kept. It is checked first; one that contradicts itself raises `RouteError`.
        backend: Name of a backend, or "auto".
        scale: Factor of the scores; None: 1 / sqrt(D).
        summary: Further keys of every query group, if any.
        out_dtype: Dtype of the output; None: q's.

    Returns:
        The output [B, H, Nq, Dv] and its natural log-sum-exp [B, H, Nq] in fp32. A row with nothing kept
        gets 0 and -inf.
    """
    call = validate(q, k, v, scale=scale)
    check_route(route, call)
    check_summary(summary, route, call)
    chosen = choose_backend(backend, Demand.of(call))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return chosen.attend(q, k, v, route, call.scale, summary, out_dtype)

"""NaN in channels that met something not finite: a pass over the output only where there are any."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import cdiv, padded


@triton.jit
def spoil_kernel(
    OUT,  # [B, H, N, D] contiguous
    LOST,  # [B, H, D] uint8
    N,
    tiles,
    D: tl.constexpr,
    SPAN: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    dims = tl.arange(0, BD)
    lost = tl.load(LOST + head * D + dims, mask=dims < D, other=0) != 0
    if tl.max(lost.to(tl.int32), 0) == 0:
        return
    nothing = tl.full([BN, BD], float("nan"), tl.float32).to(OUT.dtype.element_ty)
    start = (pid % tiles).to(tl.int64) * SPAN
    for first in range(0, SPAN, BN):
        rows = start + first + tl.arange(0, BN)
        at = OUT + (head * N + rows)[:, None] * D + dims[None, :]
        mask = (rows < N)[:, None] & lost[None, :]
        finite = tl.abs(tl.load(at, mask=mask, other=0.0).to(tl.float32)) < float("inf")
        tl.store(at, nothing, mask=mask & finite)


def spoil(out: Tensor, lost: Tensor) -> Tensor:
    """out [B, H, N, Dv] contiguous, lost [B, H, 1, Dv] bool -> out, changed in place"""
    batch, heads, count, dim = out.shape
    if not out.is_contiguous():
        return torch.where(lost & out.isfinite(), torch.nan, out)
    span = 1024  # rows of a program: nearly all programs find that nothing is lost
    tiles = cdiv(count, span)
    if out.numel():
        spoil_kernel[(batch * heads * tiles,)](
            out, lost.contiguous().view(torch.uint8), count, tiles, D=dim, SPAN=span, BN=16, BD=padded(dim), num_warps=4
        )
    return out

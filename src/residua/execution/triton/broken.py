"""What is not finite among keys and values: one pass over each, without copies."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import cdiv, padded


@triton.jit
def broken_kernel(
    X,  # [B, H, N, D] strided
    MASK,  # [B, N] uint8, or any pointer
    ROWS,  # [B, H, N] uint8, or any pointer
    CHANNELS,  # [B, H, D] int32, zeros, or any pointer
    H,
    N,
    sb,
    sh,
    sn,
    sd,
    tiles,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    MASKED: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = (pid % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    live = rows < N
    X += head // H * sb + head % H * sh
    x = tl.load(
        X + rows[:, None] * sn + dims[None, :] * sd, mask=live[:, None] & (dims < D)[None, :], other=0.0
    ).to(tl.float32)
    bad = (tl.abs(x) < float("inf")) == 0
    if MASKED:
        bad = bad & (tl.load(MASK + head // H * N + rows, mask=live, other=0) != 0)[:, None]
    if BY_ROW:
        tl.store(ROWS + head * N + rows, tl.max(bad.to(tl.int32), 1).to(tl.uint8), mask=live)
    else:
        lost = tl.max(bad.to(tl.int32), 0)
        # only ones are written, so it does not matter which program writes first
        tl.atomic_max(CHANNELS + head * D + dims, lost, mask=(dims < D) & (lost > 0))


def find_broken(x: Tensor, mask: Tensor | None, by_row: bool) -> Tensor:
    """Rows [B, H, N] or channels [B, H, D] of x that hold NaN or Inf where mask [B, N] is not False."""
    batch, heads, count, dim = x.shape
    shape = (batch, heads, count if by_row else dim)
    out = (
        torch.empty(shape, dtype=torch.uint8, device=x.device)
        if by_row
        else torch.zeros(shape, dtype=torch.int32, device=x.device)
    )
    rows = 64
    tiles = cdiv(count, rows)
    if x.numel():
        broken_kernel[(batch * heads * tiles,)](
            x,
            x if mask is None else mask.contiguous().view(torch.uint8),
            out,
            out,
            heads,
            count,
            *x.stride(),
            tiles,
            D=dim,
            BN=rows,
            BD=padded(dim),
            MASKED=mask is not None,
            BY_ROW=by_row,
            num_warps=4,
        )
    return out.view(torch.bool) if by_row else out > 0

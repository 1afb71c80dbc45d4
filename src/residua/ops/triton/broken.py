"""Channels of the values that hold NaN or Inf: one pass without copies, for calls that gather no values."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import cdiv, padded


@triton.jit
def note_lost(x, live, LOST, dims, D: tl.constexpr):
    """Marks the channels of rows x [BN, BD] that are not finite where `live` [BN]. Only ones are written, so
    it does not matter which program writes first."""
    bad = (tl.abs(x.to(tl.float32)) < float("inf")) == 0
    lost = tl.max((bad & live[:, None]).to(tl.int32), 0)
    tl.atomic_max(LOST + dims, lost, mask=(dims < D) & (lost > 0))


@triton.jit
def broken_kernel(
    X,  # [B, H, N, D] strided
    MASK,  # [B, N] uint8, or any pointer
    LOST,  # [B, H, D] int32, zeros
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
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = (pid % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    live = rows < N
    X += head // H * sb + head % H * sh
    x = tl.load(X + rows[:, None] * sn + dims[None, :] * sd, mask=live[:, None] & (dims < D)[None, :], other=0.0)
    if MASKED:
        live = live & (tl.load(MASK + head // H * N + rows, mask=live, other=0) != 0)
    note_lost(x, live, LOST + head * D, dims, D)


def lost_channels(x: Tensor, mask: Tensor | None) -> Tensor:
    """Channels [B, H, D] of x [B, H, N, D] that hold NaN or Inf where mask [B, N] is not False."""
    batch, heads, count, dim = x.shape
    lost = torch.zeros(batch, heads, dim, dtype=torch.int32, device=x.device)
    rows = 64
    tiles = cdiv(count, rows)
    if x.numel():
        broken_kernel[(batch * heads * tiles,)](
            x,
            x if mask is None else mask.contiguous().view(torch.uint8),
            lost,
            heads,
            count,
            *x.stride(),
            tiles,
            D=dim,
            BN=rows,
            BD=padded(dim),
            MASKED=mask is not None,
            num_warps=4,
        )
    return lost > 0

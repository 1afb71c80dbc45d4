"""The correction in one pass over the output: a low-rank affine map and the cast to the caller's dtype."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import cdiv, padded


@triton.jit
def affine_kernel(
    X,  # [B, H, N, D] fp32 strided
    LEFT,  # [B, H, D, R] fp32
    RIGHT,  # [B, H, R, D] fp32
    BIAS,  # [B, H, D] fp32
    OUT,  # [B, H, N, D] contiguous
    H,
    N,
    R,
    sb,
    sh,
    sn,
    sd,
    tiles,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = (pid % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BR)
    X += head // H * sb + head % H * sh
    LEFT += head * D * R
    RIGHT += head * D * R
    OUT += head * N * D
    low = tl.zeros([BN, BR], tl.float32)
    for start in range(0, D, BD):
        dims = start + tl.arange(0, BD)
        mask = (rows < N)[:, None] & (dims < D)[None, :]
        x = tl.load(X + rows[:, None] * sn + dims[None, :] * sd, mask=mask, other=0.0)
        side = (dims < D)[:, None] & (cols < R)[None, :]
        left = tl.load(LEFT + dims[:, None] * R + cols[None, :], mask=side, other=0.0)
        low = tl.dot(x, left, low, input_precision="tf32x3")
    for start in range(0, D, BD):
        dims = start + tl.arange(0, BD)
        mask = (rows < N)[:, None] & (dims < D)[None, :]
        x = tl.load(X + rows[:, None] * sn + dims[None, :] * sd, mask=mask, other=0.0)  # still in the cache
        side = (cols < R)[:, None] & (dims < D)[None, :]
        right = tl.load(RIGHT + cols[:, None] * D + dims[None, :], mask=side, other=0.0)
        bias = tl.load(BIAS + head * D + dims, mask=dims < D, other=0.0)
        y = tl.dot(low, right, x + bias[None, :], input_precision="tf32x3")
        tl.store(OUT + rows[:, None] * D + dims[None, :], y.to(OUT.dtype.element_ty), mask=mask)


def add_affine(out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """`out + out @ left @ right + bias` as `dtype`.

    out [B, H, N, Dv] fp32, left [B, H, Dv, R], right [B, H, R, Dv], bias [B, H, Dv]
    """
    batch, heads, count, dim = out.shape
    rank = left.shape[-1]
    # every program reads what it overwrites first, so fp32 can stay in place
    in_place = out.dtype == dtype and out.is_contiguous()
    result = out if in_place else torch.empty(out.shape, dtype=dtype, device=out.device)
    if result.numel() == 0:
        return result
    rows = 64
    tiles = cdiv(count, rows)
    affine_kernel[(batch * heads * tiles,)](
        out,
        left.float().contiguous(),
        right.float().contiguous(),
        bias.float().contiguous(),
        result,
        heads,
        count,
        rank,
        *out.stride(),
        tiles,
        D=dim,
        BN=rows,
        BD=64 if dim > 32 else 32,
        BR=padded(rank),
        num_warps=4,
        num_stages=2,
    )
    return result

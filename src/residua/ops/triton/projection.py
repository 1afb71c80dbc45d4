"""Response coordinates: rows times a factor, each row divided by its RMS, in one pass over the rows."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import MIN_RMS
from .kmeans import only_finite
from .shapes import FRUGAL_GPUS, architecture, cdiv, padded


@triton.jit
def project_kernel(
    X,  # [B, H, N, D] strided
    W,  # [B, H, D, R] fp32
    Y,  # [B, H, N, R] fp32, or fp16 for coordinates that are only compared
    H,
    N,
    R,
    sb,
    sh,
    sn,
    sd,
    tiles,
    columns,  # D, as a number that the compiler does not know: it would unroll the loop, and spill
    floor,
    D: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = (pid % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    cols = tl.arange(0, BR)
    X += head // H * sb + head % H * sh
    W += head * D * R
    y = tl.zeros([BN, BR], tl.float32)
    for start in range(0, columns, BK):
        dims = start + tl.arange(0, BK)
        x = tl.load(
            X + rows[:, None] * sn + dims[None, :] * sd, mask=(rows < N)[:, None] & (dims < D)[None, :], other=0.0
        )
        w = tl.load(W + dims[:, None] * R + cols[None, :], mask=(dims < D)[:, None] & (cols < R)[None, :], other=0.0)
        if x.dtype == tl.float32:
            y = tl.dot(x, w, y, input_precision="tf32x3")
        else:
            for _ in tl.static_range(3):  # three parts of 16 bits hold all digits of the factor
                part = w.to(x.dtype)
                y = tl.dot(x, part, y)
                w -= part.to(tl.float32)
    if NORMALISE:
        rms = tl.sqrt(tl.sum(y * y, 1) / R)
        y /= tl.maximum(rms, floor)[:, None]
    if Y.dtype.element_ty == tl.float16:
        y = only_finite(y)
    Y += head * N * R
    tl.store(
        Y + rows[:, None] * R + cols[None, :], y.to(Y.dtype.element_ty), mask=(rows < N)[:, None] & (cols < R)[None, :]
    )


def project(x: Tensor, factor: Tensor, normalise: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [B, H, N, D], factor [B, H, D, R] fp32 -> [B, H, N, R] in fp32, or in fp16: then finite"""
    batch, heads, count, dim = x.shape
    rank = factor.shape[-1]
    out = torch.empty(batch, heads, count, rank, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = 64
    tiles = cdiv(count, rows)
    project_kernel[(batch * heads * tiles,)](
        x,
        factor.float().contiguous(),
        out,
        heads,
        count,
        rank,
        *x.stride(),
        tiles,
        dim,
        MIN_RMS,
        D=dim,
        BN=rows,
        BK=32,
        BR=padded(rank),
        NORMALISE=normalise,
        num_warps=4 if rank <= 64 else 8,
        num_stages=1 if rank > 64 and architecture() in FRUGAL_GPUS else 2,
    )
    return out

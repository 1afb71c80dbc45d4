"""Products of all rows with a small matrix: response coordinates, and the probe fit's low-rank correction."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import MIN_RMS
from .device_functions import finite_fp16, head_start, load_matrix, load_rows, row_block, store_rows
from .shapes import FRUGAL_GPUS, architecture, cdiv, padded


@triton.jit
def project_kernel(
    X,  # [B, H, N, D] strided
    W,  # [B, H, D, R] fp32
    Y,  # [B, H, N, R] fp32, or fp16 for coordinates that are only compared
    H,
    N,
    R,
    strides,
    tiles,
    columns,  # D, as a number that the compiler does not know: it would unroll the loop, and spill
    minimum,
    D: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One program: Y = X @ W for BN rows of a head, each divided by its root mean square if NORMALISE."""
    head, rows = row_block(tiles, BN)
    cols = tl.arange(0, BR)
    X = head_start(X, strides, head, H)
    W += head * D * R
    # y = x @ w, BK columns of x at a time
    y = tl.zeros([BN, BR], tl.float32)
    for start in range(0, columns, BK):
        dims = start + tl.arange(0, BK)
        x = load_rows(X, strides, rows, dims, rows < N, D)
        w = load_matrix(W, dims, cols, D, R)
        if x.dtype == tl.float32:
            y = tl.dot(x, w, y, input_precision="tf32x3")
        else:
            for _ in tl.static_range(3):  # three parts of 16 bits hold all digits of the factor
                part = w.to(x.dtype)
                y = tl.dot(x, part, y)
                w -= part.to(tl.float32)
    # y / max(rms(y), minimum)
    if NORMALISE:
        rms = tl.sqrt(tl.sum(y * y, 1) / R)
        y /= tl.maximum(rms, minimum)[:, None]
    if Y.dtype.element_ty == tl.float16:
        y = finite_fp16(y)
    store_rows(Y + head * N * R, rows, cols, y, rows < N, R)


def project(x: Tensor, factor: Tensor, normalise: bool, rough: bool = False) -> Tensor:
    """x [B, H, N, D], factor [B, H, D, R] fp32 -> [B, H, N, R] in fp32. A `rough` one of rows of 16 bits is in fp16 and
    finite: 11 binary digits are more than such rows have to offer."""
    batch, heads, count, dim = x.shape
    dtype = torch.float16 if rough and x.dtype != torch.float32 else torch.float32
    rank = factor.shape[-1]
    out = torch.empty(batch, heads, count, rank, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = 64
    tiles = cdiv(count, rows)
    sizes = (heads, count, rank, x.stride(), tiles, dim, MIN_RMS)
    blocks = {"D": dim, "BN": rows, "BK": 32, "BR": padded(rank), "NORMALISE": normalise}
    warps, stages = (4 if rank <= 64 else 8), (1 if rank > 64 and architecture() in FRUGAL_GPUS else 2)
    project_kernel[(batch * heads * tiles,)](
        x, factor.float().contiguous(), out, *sizes, **blocks, num_warps=warps, num_stages=stages
    )
    return out


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
    strides,
    tiles,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """One program: OUT = X + X @ LEFT @ RIGHT + BIAS for BN rows of a head, BD columns at a time."""
    head, rows = row_block(tiles, BN)
    cols = tl.arange(0, BR)
    X = head_start(X, strides, head, H)
    LEFT += head * D * R
    RIGHT += head * D * R
    OUT += head * N * D
    # low = x @ left  # [BN, R]
    low = tl.zeros([BN, BR], tl.float32)
    for start in range(0, D, BD):
        dims = start + tl.arange(0, BD)
        x = load_rows(X, strides, rows, dims, rows < N, D)
        left = load_matrix(LEFT, dims, cols, D, R)
        low = tl.dot(x, left, low, input_precision="tf32x3")
    # y = x + bias + low @ right
    for start in range(0, D, BD):
        dims = start + tl.arange(0, BD)
        x = load_rows(X, strides, rows, dims, rows < N, D)  # still in the cache
        right = load_matrix(RIGHT, cols, dims, R, D)
        bias = tl.load(BIAS + head * D + dims, mask=dims < D, other=0.0)
        y = tl.dot(low, right, x + bias[None, :], input_precision="tf32x3")
        store_rows(OUT, rows, dims, y, rows < N, D)


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
    tensors = (out, *(t.float().contiguous() for t in (left, right, bias)), result)
    sizes = (heads, count, rank, out.stride(), tiles)
    blocks = {"D": dim, "BN": rows, "BD": 64 if dim > 32 else 32, "BR": padded(rank)}
    affine_kernel[(batch * heads * tiles,)](*tensors, *sizes, **blocks, num_warps=4, num_stages=2)
    return result

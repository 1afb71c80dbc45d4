"""Rows into group-major order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import head_start, load_rows, row_block
from .nonfinite import note_lost
from .shapes import cdiv, padded


@triton.jit
def permute_kernel(
    X,  # [B, H, N, D] strided
    ORDER,  # [B, H, M] int64
    OUT,  # [B, H, M, DO]
    LOST,  # [B, H, D] int32, zeros, or None: channels that are not finite
    OFFSETS,  # [B, H, C + 1] int64, or None: only rows before the last of them are looked at
    C,
    H,
    M,
    strides,
    tiles,
    D: tl.constexpr,
    DO: tl.constexpr,  # columns of a row of OUT; those past D are 0
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """One program: BM rows of OUT, OUT[m] = X[ORDER[m]]. Marks in LOST which channels are not finite."""
    head, here = row_block(tiles, BM)
    dims = tl.arange(0, BD)
    source = tl.load(ORDER + head * M + here, mask=here < M, other=0)
    OUT += head * M * DO
    x = load_rows(head_start(X, strides, head, H), strides, source, dims, here < M, D)
    if LOST is not None:
        note_lost(x, here < tl.load(OFFSETS + head * (C + 1) + C), LOST + head * D, dims, D)
    tl.store(OUT + here[:, None] * DO + dims[None, :], x, mask=(here < M)[:, None] & (dims < DO)[None, :])


def gather_rows(x: Tensor, order: Tensor, columns: int | None = None) -> Tensor:
    """out[m] = x[order[m]], with zeros behind it if `columns` are more than x has.

    x [B, H, N, D], order [B, H, M] -> contiguous [B, H, M, columns or D]
    """
    batch, heads, _, dim = x.shape
    out = torch.empty(batch, heads, order.shape[-1], columns or dim, dtype=x.dtype, device=x.device)
    return _launch(x, order, out)


def gather_noting(x: Tensor, order: Tensor, offsets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """`gather_rows`, and the channels in which a row of any group holds NaN or Inf.

    x [B, H, N, D], order [B, H, N], offsets [B, H, C + 1] -> [B, H, N, columns], [B, H, D] int32, 0 or 1
    """
    batch, heads, _, dim = x.shape
    out = torch.empty(batch, heads, order.shape[-1], columns, dtype=x.dtype, device=x.device)
    lost = torch.zeros(batch, heads, dim, dtype=torch.int32, device=x.device)
    return _launch(x, order, out, lost=lost, offsets=offsets), lost


def _launch(x: Tensor, order: Tensor, out: Tensor, lost: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    if out.numel() == 0:
        return out
    batch, heads, count = order.shape
    rows = 32
    tiles = cdiv(count, rows)
    tensors = (x, order.contiguous(), out, lost, None if offsets is None else offsets.contiguous())
    sizes = (0 if offsets is None else offsets.shape[-1] - 1, heads, count, x.stride(), tiles)
    blocks = {"D": x.shape[-1], "DO": out.shape[-1], "BM": rows, "BD": padded(out.shape[-1])}
    permute_kernel[(batch * heads * tiles,)](*tensors, *sizes, **blocks)
    return out

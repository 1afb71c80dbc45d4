"""Channels of the values that hold NaN or Inf: found in one pass without copies, and written as NaN into the output,
in a pass over it only where there are any."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import head_start, load_rows, row_block
from .shapes import as_bytes, cdiv, padded


@triton.jit
def note_lost(x, live, LOST, dims, D: tl.constexpr):
    """Marks the channels of rows x [BN, BD] that are not finite where `live` [BN]. Only ones are written, so
    it does not matter which program writes first."""
    bad = (tl.abs(x.to(tl.float32)) < float("inf")) == 0
    lost = tl.max((bad & live[:, None]).to(tl.int32), 0)
    tl.atomic_max(LOST + dims, lost, mask=(dims < D) & (lost > 0))


@triton.jit
def broken_kernel(X, MASK, LOST, H, N, strides, tiles, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """One program: BN rows of a head of a strided X [B, H, N, D] that count by MASK [B, N] uint8, or all if that is
    None. Marks their channels that are not finite in LOST [B, H, D] int32, which begins as zeros."""
    head, rows = row_block(tiles, BN)
    dims = tl.arange(0, BD)
    live = rows < N
    x = load_rows(head_start(X, strides, head, H), strides, rows, dims, live, D)
    if MASK is not None:
        live = live & (tl.load(MASK + head // H * N + rows, mask=live, other=0) != 0)
    note_lost(x, live, LOST + head * D, dims, D)


@triton.jit
def spoil_kernel(OUT, LOST, N, tiles, D: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """One program: SPAN rows of a head of OUT [B, H, N, D]. Writes NaN into their LOST [B, H, D] channels, but keeps an
    Inf."""
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


def lost_channels(x: Tensor, mask: Tensor | None) -> Tensor:
    """Channels [B, H, D] of x [B, H, N, D] that hold NaN or Inf where mask [B, N] is not False."""
    batch, heads, count, dim = x.shape
    lost = torch.zeros(batch, heads, dim, dtype=torch.int32, device=x.device)
    rows = 64
    tiles = cdiv(count, rows)
    if x.numel():
        sizes = (heads, count, x.stride(), tiles)
        broken_kernel[(batch * heads * tiles,)](x, as_bytes(mask), lost, *sizes, D=dim, BN=rows, BD=padded(dim))
    return lost > 0


def spoil(out: Tensor, lost: Tensor) -> Tensor:
    """out [B, H, N, Dv] contiguous, lost [B, H, 1, Dv] bool -> out, changed in place"""
    batch, heads, count, dim = out.shape
    if not out.is_contiguous():
        return torch.where(lost & out.isfinite(), torch.nan, out)
    span = 1024  # rows of a program: nearly all programs find that nothing is lost
    tiles = cdiv(count, span)
    if out.numel():
        blocks = {"D": dim, "SPAN": span, "BN": 16, "BD": padded(dim)}
        spoil_kernel[(batch * heads * tiles,)](out, as_bytes(lost), count, tiles, **blocks)
    return out

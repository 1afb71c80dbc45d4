"""Exact attention of a few rows, and beside it over the keys that each row keeps: one pass for both.

The keys are split as in rows.py, and the parts of both sums are merged in a fixed order.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .constants import LOG2_E
from .rows import merge_parts, split_keys
from .shapes import Tiles, architecture, cdiv, padded, positive_scale, precision, processors
from .softmax import fold


@triton.jit
def split_kernel(
    Q,  # [B, H, M, D] strided
    K,  # [B, Hkv, NK, D] strided
    V,  # [B, Hkv, NK, DV] strided
    KEY_MASK,  # [B, NK] uint8, or any pointer
    LABELS,  # [B, Hkv, NK] int64
    KEPT,  # [B, H, M, CK] uint8
    ACC,  # [2, B, H, parts, M, DV] fp32: over all keys, over the kept ones
    TOP,  # [2, B, H, parts, M] fp32
    TOTAL,  # [2, B, H, parts, M] fp32
    H,
    shares,
    M,
    NK,
    CK,
    parts,
    span,
    tiles,
    other,  # B * H * parts * M: where the sums over the kept keys begin
    qb,
    qh,
    qn,
    qd,
    kb,
    kh,
    kn,
    kd,
    vb,
    vh,
    vn,
    vd,
    scale,  # times log2(e), above 0
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // (tiles * parts)).to(tl.int64)
    part = pid // tiles % parts
    rows = (pid % tiles).to(tl.int64) * BM + tl.arange(0, BM)
    batch = head // H
    kv_head = head % H // shares
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BDV)
    Q += batch * qb + head % H * qh
    K += batch * kb + kv_head * kh
    V += batch * vb + kv_head * vh
    LABELS += (batch * (H // shares) + kv_head) * NK
    KEPT += (head * M + rows) * CK
    q = tl.load(Q + rows[:, None] * qn + dims[None, :] * qd, mask=(rows < M)[:, None] & (dims < D)[None, :], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    kept_top = tl.full([BM], -float("inf"), tl.float32)
    kept_total = tl.zeros([BM], tl.float32)
    kept_acc = tl.zeros([BM, BDV], tl.float32)
    for first in range(part * span, tl.minimum(part * span + span, NK), BN):
        keys = (first + tl.arange(0, BN)).to(tl.int64)
        live = keys < NK
        label = tl.load(LABELS + keys, mask=live, other=-1)
        seen = (rows < M)[:, None] & (label >= 0)[None, :]
        seen = tl.load(KEPT[:, None] + label[None, :], mask=seen, other=0) != 0
        if MASKED:
            live = live & (tl.load(KEY_MASK + batch * NK + keys, mask=live, other=0) != 0)
        k = tl.load(K + keys[None, :] * kn + dims[:, None] * kd, mask=live[None, :] & (dims < D)[:, None], other=0.0)
        v = tl.load(V + keys[:, None] * vn + cols[None, :] * vd, mask=live[:, None] & (cols < DV)[None, :], other=0.0)
        scores = tl.where(live[None, :], tl.dot(q, k, input_precision=PRECISION), -float("inf"))
        top, total, acc = fold(scores, scale, v, top, total, acc, PRECISION)
        # what no row keeps must not reach it as 0 * NaN
        v = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], v, 0.0)
        scores = tl.where(seen, scores, -float("inf"))
        kept_top, kept_total, kept_acc = fold(scores, scale, v, kept_top, kept_total, kept_acc, PRECISION)
    at = (head * parts + part) * M + rows
    mask = (rows < M)[:, None] & (cols < DV)[None, :]
    tl.store(ACC + at[:, None] * DV + cols[None, :], acc, mask=mask)
    tl.store(TOP + at, top, mask=rows < M)
    tl.store(TOTAL + at, total, mask=rows < M)
    at += other
    tl.store(ACC + at[:, None] * DV + cols[None, :], kept_acc, mask=mask)
    tl.store(TOP + at, kept_top, mask=rows < M)
    tl.store(TOTAL + at, kept_total, mask=rows < M)


def tiles_for(width: int, dtype: torch.dtype, ragged: bool) -> Tiles:
    """Tile sizes that pass the compile gate: two sums take twice the registers of one, and rows that end
    inside a block of 16 columns are addressed column by column."""
    if dtype == torch.float32:
        return Tiles(32 if width <= 64 else 16, 16, 8, 2 if width <= 128 else 1)
    rows = 32 if ragged or architecture() >= 120 else 64
    return Tiles(rows, 32, 8, 2) if width <= 128 else Tiles(32, 16, 8, 2)


def split_rows(
    rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [B, H, M, D], kept [B, H, M, Ck] bool -> exact and kept outputs [B, H, M, Dv], log-sum-exp of the
    kept keys [B, H, M], all fp32"""
    batch, heads, count, dim = rows.shape
    keys, value_dim = k.shape[2], v.shape[-1]
    width = max(padded(dim), padded(value_dim))
    size = tiles_for(width, rows.dtype, (dim % 16 or value_dim % 16) > 0)
    tiles = cdiv(max(1, count), size.rows)
    parts, span = split_keys(batch * heads * tiles, keys, size.keys, processors(rows))
    acc = torch.empty(2, batch, heads, parts, count, value_dim, dtype=torch.float32, device=rows.device)
    top = torch.empty(2, batch, heads, parts, count, dtype=torch.float32, device=rows.device)
    total = torch.empty_like(top)
    if acc.numel() and keys:
        rows, scale = positive_scale(rows, scale)
        split_kernel[(batch * heads * parts * tiles,)](
            rows,
            k,
            v,
            rows if key_mask is None else key_mask.contiguous().view(torch.uint8),
            kv.labels.contiguous(),
            kept.contiguous().view(torch.uint8),
            acc,
            top,
            total,
            heads,
            heads // k.shape[1],
            count,
            keys,
            kv.groups,
            parts,
            span,
            tiles,
            batch * heads * parts * count,
            *rows.stride(),
            *k.stride(),
            *v.stride(),
            scale * LOG2_E.value,
            D=dim,
            DV=value_dim,
            BM=size.rows,
            BN=size.keys,
            BD=padded(dim),
            BDV=padded(value_dim),
            MASKED=key_mask is not None,
            PRECISION=precision(rows.dtype, width),
            num_warps=size.warps,
            num_stages=size.stages,
        )
    both, lse = merge_parts(acc.flatten(0, 1), top.flatten(0, 1), total.flatten(0, 1))
    out, lse = both.unflatten(0, (2, batch)), lse.unflatten(0, (2, batch))
    return out[0], out[1], lse[1]

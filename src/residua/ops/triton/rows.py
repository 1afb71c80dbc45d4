"""Exact attention of a few rows over all keys. The keys are split so that 64 rows still fill the GPU; the
parts are merged in a fixed order, so repeats are bit-identical."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .constants import LN_2, LOG2_E
from .shapes import WARP_GROUP_GPUS, Tiles, architecture, cdiv, padded, positive_scale, precision, processors
from .softmax import fold

PROGRAMS_PER_PROCESSOR = 4
MIN_KEY_TILES = 4  # below this a part costs more to merge than it saves


@triton.jit
def rows_kernel(
    Q,  # [B, H, M, D] strided
    K,  # [B, Hkv, NK, D] strided
    V,  # [B, Hkv, NK, DV] strided
    KEY_MASK,  # [B, NK] uint8, or any pointer
    ACC,  # [B, H, parts, M, DV] fp32
    TOP,  # [B, H, parts, M] fp32
    TOTAL,  # [B, H, parts, M] fp32
    H,
    shares,
    M,
    NK,
    parts,
    span,
    tiles,
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
    scale,  # times log2(e)
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
    q = tl.load(Q + rows[:, None] * qn + dims[None, :] * qd, mask=(rows < M)[:, None] & (dims < D)[None, :], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    for first in range(part * span, tl.minimum(part * span + span, NK), BN):
        keys = (first + tl.arange(0, BN)).to(tl.int64)
        live = keys < NK
        if MASKED:
            live = live & (tl.load(KEY_MASK + batch * NK + keys, mask=live, other=0) != 0)
        k = tl.load(K + keys[None, :] * kn + dims[:, None] * kd, mask=live[None, :] & (dims < D)[:, None], other=0.0)
        v = tl.load(V + keys[:, None] * vn + cols[None, :] * vd, mask=live[:, None] & (cols < DV)[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION)
        scores = tl.where(live[None, :], scores, -float("inf"))
        top, total, acc = fold(scores, scale, v, top, total, acc, PRECISION)
    at = (head * parts + part) * M + rows
    tl.store(ACC + at[:, None] * DV + cols[None, :], acc, mask=(rows < M)[:, None] & (cols < DV)[None, :])
    tl.store(TOP + at, top, mask=rows < M)
    tl.store(TOTAL + at, total, mask=rows < M)


@triton.jit
def merge_kernel(
    ACC,  # [B, H, parts, M, DV] fp32
    TOP,  # [B, H, parts, M] fp32
    TOTAL,  # [B, H, parts, M] fp32
    OUT,  # [B, H, M, DV] fp32
    LSE,  # [B, H, M] fp32
    M,
    parts,
    DV: tl.constexpr,
    BDV: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid // M
    cols = tl.arange(0, BDV)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BDV], tl.float32)
    for part in range(0, parts):
        at = (head * parts + part) * M + pid % M
        new_top = tl.maximum(top, tl.load(TOP + at))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - safe)
        weight = tl.exp2(tl.load(TOP + at) - safe)
        total = total * fade + tl.load(TOTAL + at) * weight
        acc = acc * fade + tl.load(ACC + at * DV + cols, mask=cols < DV, other=0.0) * weight
        top = new_top
    # a row whose keys are all padding is 0, its log-sum-exp -inf
    tl.store(OUT + pid * DV + cols, acc / tl.where(total == 0.0, 1.0, total), mask=cols < DV)
    safe = tl.where(top == -float("inf"), 0.0, top)
    tl.store(LSE + pid, (safe + tl.log2(total)) * LN_2)


def tiles_for(width: int, dtype: torch.dtype, many: bool, ragged: bool) -> Tiles:
    """Tile sizes that pass the compile gate."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if width <= 64 else Tiles(32, 16, 8, 2 if width <= 128 else 1)
    if width > 128:
        return Tiles(32, 32, 4, 2)
    if architecture() in WARP_GROUP_GPUS:
        return Tiles(64, 64, 4, 2)
    # where single warps multiply, a tile of fewer rows than columns is spread over the warps by columns
    if ragged:  # addressed column by column, which takes registers
        return Tiles(64, 32, 8, 2)
    return Tiles(128, 64, 8, 2) if many else Tiles(64, 32, 4, 2)


def split_keys(programs: int, keys: int, tile_keys: int, processors_: int) -> tuple[int, int]:
    """Parts and keys per part: enough programs for every processor, no part too short to be worth it."""
    tiles = cdiv(keys, tile_keys)
    wanted = cdiv(PROGRAMS_PER_PROCESSOR * processors_, max(1, programs))
    per_part = max(MIN_KEY_TILES, cdiv(tiles, wanted))
    return cdiv(tiles, per_part), per_part * tile_keys


def attend_rows(rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """rows [B, H, M, D], k/v [B, Hkv, Nk, .], key_mask [B, Nk] bool -> [B, H, M, Dv] fp32"""
    batch, heads, count, dim = rows.shape
    keys, value_dim = k.shape[2], v.shape[-1]
    out = torch.empty(batch, heads, count, value_dim, dtype=torch.float32, device=rows.device)
    if out.numel() == 0 or keys == 0:
        return out.zero_()
    width = max(padded(dim), padded(value_dim))
    size = tiles_for(width, rows.dtype, count > 64, (dim % 16 or value_dim % 16) > 0)
    tiles = cdiv(count, size.rows)
    parts, span = split_keys(batch * heads * tiles, keys, size.keys, processors(rows))
    acc = torch.empty(batch, heads, parts, count, value_dim, dtype=torch.float32, device=rows.device)
    top = torch.empty(batch, heads, parts, count, dtype=torch.float32, device=rows.device)
    total = torch.empty_like(top)
    rows, scale = positive_scale(rows, scale)
    rows_kernel[(batch * heads * parts * tiles,)](
        rows,
        k,
        v,
        rows if key_mask is None else key_mask.contiguous().view(torch.uint8),
        acc,
        top,
        total,
        heads,
        heads // k.shape[1],
        count,
        keys,
        parts,
        span,
        tiles,
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
    return merge_parts(acc, top, total)[0]


def merge_parts(acc: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the sums over parts of the keys, in their order.

    acc [B, H, parts, M, Dv], top and total [B, H, parts, M] -> out [B, H, M, Dv], log-sum-exp [B, H, M]
    """
    batch, heads, parts, count, value_dim = acc.shape
    out = torch.empty(batch, heads, count, value_dim, dtype=torch.float32, device=acc.device)
    lse = torch.empty(batch, heads, count, dtype=torch.float32, device=acc.device)
    if lse.numel():
        merge_kernel[(batch * heads * count,)](
            acc, top, total, out, lse, count, parts, DV=value_dim, BDV=padded(value_dim), num_warps=1
        )
    return out, lse

"""Exact attention of a few rows over all keys, and, if asked for, over the keys that each row keeps: one pass for both.

The keys are split so that 64 rows still fill the GPU; the parts are merged in a fixed order, so repeats are
bit-identical.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .device_functions import LN_2, LOG2_E, attend_tile, head_start, load_rows
from .shapes import WARP_GROUP_GPUS, Tiles, architecture, as_bytes, cdiv, padded, positive_scale, precision, processors

PROGRAMS_PER_PROCESSOR = 4
MIN_KEY_TILES = 4  # below this a part costs more to merge than it saves


@triton.jit
def rows_kernel(
    Q,  # [B, H, M, D] strided
    K,  # [B, Hkv, NK, D] strided
    V,  # [B, Hkv, NK, DV] strided
    KEY_MASK,  # [B, NK] uint8, or None
    LABELS,  # [B, Hkv, NK] int64, or None: the group of every key
    KEPT,  # [B, H, M, CK] uint8, or None: the groups that each row keeps
    ACC,  # [1 or 2, B, H, parts, M, DV] fp32: over all keys, over the kept ones
    TOP,  # [1 or 2, B, H, parts, M] fp32
    TOTAL,  # [1 or 2, B, H, parts, M] fp32
    H,
    heads_per_kv,
    M,
    NK,
    CK,
    parts,
    span,
    tiles,
    other,  # B * H * parts * M: where the sums over the kept keys begin
    q_strides,
    k_strides,
    v_strides,
    scale,  # times log2(e), above 0
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BM rows of a head over one part of the keys, `span` of them. Writes the maximum, the total and the
    weighted values of its online softmax; with KEPT those over the kept keys as well."""
    pid = tl.program_id(0)
    head = (pid // (tiles * parts)).to(tl.int64)
    part = pid // tiles % parts
    rows = (pid % tiles).to(tl.int64) * BM + tl.arange(0, BM)
    batch = head // H
    kv_head = head % H // heads_per_kv
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BDV)
    K += batch * k_strides[0] + kv_head * k_strides[1]
    V += batch * v_strides[0] + kv_head * v_strides[1]
    q = load_rows(head_start(Q, q_strides, head, H), q_strides, rows, dims, rows < M, D)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    if KEPT is not None:
        LABELS += (batch * (H // heads_per_kv) + kv_head) * NK
        KEPT += (head * M + rows) * CK
        kept_top = tl.full([BM], -float("inf"), tl.float32)
        kept_total = tl.zeros([BM], tl.float32)
        kept_acc = tl.zeros([BM, BDV], tl.float32)
    for first in range(part * span, tl.minimum(part * span + span, NK), BN):
        keys = (first + tl.arange(0, BN)).to(tl.int64)
        live = keys < NK
        # which rows keep which keys
        if KEPT is not None:
            label = tl.load(LABELS + keys, mask=live, other=-1)
            seen = (rows < M)[:, None] & (label >= 0)[None, :]
            seen = tl.load(KEPT[:, None] + label[None, :], mask=seen, other=0) != 0
        if KEY_MASK is not None:
            live = live & (tl.load(KEY_MASK + batch * NK + keys, mask=live, other=0) != 0)
        # load and score
        at = K + keys[None, :] * k_strides[2] + dims[:, None] * k_strides[3]
        k = tl.load(at, mask=live[None, :] & (dims < D)[:, None], other=0.0)
        v = load_rows(V, v_strides, keys, cols, live, DV)
        scores = tl.where(live[None, :], tl.dot(q, k, input_precision=PRECISION), -float("inf"))
        # online softmax and weighted values, over all keys and over the kept ones
        top, total, acc = attend_tile(scores, scale, v, top, total, acc, PRECISION)
        if KEPT is not None:
            # what no row keeps must not reach it as 0 * NaN
            v = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], v, 0.0)
            scores = tl.where(seen, scores, -float("inf"))
            kept_top, kept_total, kept_acc = attend_tile(scores, scale, v, kept_top, kept_total, kept_acc, PRECISION)
    at = (head * parts + part) * M + rows
    mask = (rows < M)[:, None] & (cols < DV)[None, :]
    tl.store(ACC + at[:, None] * DV + cols[None, :], acc, mask=mask)
    tl.store(TOP + at, top, mask=rows < M)
    tl.store(TOTAL + at, total, mask=rows < M)
    if KEPT is not None:
        at += other
        tl.store(ACC + at[:, None] * DV + cols[None, :], kept_acc, mask=mask)
        tl.store(TOP + at, kept_top, mask=rows < M)
        tl.store(TOTAL + at, kept_total, mask=rows < M)


@triton.jit
def merge_kernel(ACC, TOP, TOTAL, OUT, LSE, M, parts, DV: tl.constexpr, BDV: tl.constexpr):
    """One program: one row of a head. OUT [B, H, M, DV] and its natural LSE [B, H, M] over all parts of the keys, in
    their order: ACC [B, H, parts, M, DV], TOP and TOTAL [B, H, parts, M]. All fp32."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid // M
    cols = tl.arange(0, BDV)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BDV], tl.float32)
    for part in range(0, parts):
        at = (head * parts + part) * M + pid % M
        # both sums rescaled to the larger maximum
        new_top = tl.maximum(top, tl.load(TOP + at))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        rescale = tl.exp2(top - safe)
        weight = tl.exp2(tl.load(TOP + at) - safe)
        total = total * rescale + tl.load(TOTAL + at) * weight
        acc = acc * rescale + tl.load(ACC + at * DV + cols, mask=cols < DV, other=0.0) * weight
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


def split_tiles_for(width: int, dtype: torch.dtype, ragged: bool) -> Tiles:
    """The same for two sums: they take twice the registers of one, and rows that end inside a block of 16 columns
    are addressed column by column."""
    if dtype == torch.float32:
        return Tiles(32 if width <= 64 else 16, 16, 8, 2 if width <= 128 else 1)
    rows = 32 if ragged or architecture() >= 120 else 64
    return Tiles(rows, 32, 8, 2) if width <= 128 else Tiles(32, 16, 8, 2)


def split_keys(programs: int, keys: int, tile_keys: int, processors_: int) -> tuple[int, int]:
    """Parts and keys per part: enough programs for every processor, no part too short to be worth it."""
    tiles = cdiv(keys, tile_keys)
    wanted = cdiv(PROGRAMS_PER_PROCESSOR * processors_, max(1, programs))
    per_part = max(MIN_KEY_TILES, cdiv(tiles, wanted))
    return cdiv(tiles, per_part), per_part * tile_keys


def attend_rows(rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """rows [B, H, M, D], k/v [B, Hkv, Nk, .], key_mask [B, Nk] bool -> [B, H, M, Dv] fp32"""
    return _attend(rows, k, v, None, None, key_mask, scale)[0][0]


def split_rows(
    rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [B, H, M, D], kept [B, H, M, Ck] bool -> exact and kept outputs [B, H, M, Dv], log-sum-exp of the
    kept keys [B, H, M], all fp32"""
    out, lse = _attend(rows, k, v, kv, kept, key_mask, scale)
    return out[0], out[1], lse[1]


def _attend(
    rows: Tensor, k: Tensor, v: Tensor, kv: Partition | None, kept: Tensor | None, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """-> outputs [1 or 2, B, H, M, Dv] and log-sum-exp [1 or 2, B, H, M], over all keys and over the kept ones"""
    batch, heads, count, dim = rows.shape
    keys, value_dim = k.shape[2], v.shape[-1]
    width, ragged = max(padded(dim), padded(value_dim)), (dim % 16 or value_dim % 16) > 0
    sums = 1 if kept is None else 2
    size = tiles_for(width, rows.dtype, count > 64, ragged) if sums == 1 else split_tiles_for(width, rows.dtype, ragged)
    tiles = cdiv(max(1, count), size.rows)
    parts, span = split_keys(batch * heads * tiles, keys, size.keys, processors(rows))
    acc = torch.empty(sums, batch, heads, parts, count, value_dim, dtype=torch.float32, device=rows.device)
    top = torch.empty(sums, batch, heads, parts, count, dtype=torch.float32, device=rows.device)
    total = torch.empty_like(top)
    if acc.numel() and keys:
        rows, scale = positive_scale(rows, scale)
        labels = None if kv is None else kv.labels.contiguous()
        tensors = (rows, k, v, as_bytes(key_mask), labels, as_bytes(kept), acc, top, total)
        groups, kept_start = (0 if kv is None else kv.groups), batch * heads * parts * count
        sizes = (heads, heads // k.shape[1], count, keys, groups, parts, span, tiles, kept_start)
        strides = (rows.stride(), k.stride(), v.stride())
        blocks = {"BM": size.rows, "BN": size.keys, "BD": padded(dim), "BDV": padded(value_dim)}
        kind = {"PRECISION": precision(rows.dtype, width), **size.options}
        rows_kernel[(batch * heads * parts * tiles,)](
            *tensors, *sizes, *strides, scale * LOG2_E.value, D=dim, DV=value_dim, **blocks, **kind
        )
    out = torch.empty(sums, batch, heads, count, value_dim, dtype=torch.float32, device=rows.device)
    lse = torch.empty(sums, batch, heads, count, dtype=torch.float32, device=rows.device)
    if out.numel():
        merge_kernel[(lse.numel(),)](
            acc, top, total, out, lse, count, parts, DV=value_dim, BDV=padded(value_dim), num_warps=1
        )
    return out, lse

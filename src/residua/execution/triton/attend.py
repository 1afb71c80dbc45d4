"""Variable-block sparse attention: one program per tile of query rows walks the key tiles of its query group.

Which keys make up a tile is decided beforehand (schedule.py). Most tiles are full, so the loop over them has
no mask; the few that are cut come after it, then the summary of what is skipped.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Route, SummaryKeys
from .drift import drift_rows
from .schedule import row_tile, schedule_tiles
from .shapes import WARP_GROUP_GPUS, Tiles, architecture, padded, positive_scale, precision
from .softmax import fold


@triton.jit
def attend_kernel(
    Q,  # [B, H, NQ, D] strided, original order
    K,  # [B, Hkv, NK, BD] group-major, zeros behind column D
    V,  # [B, Hkv, NK, BDV] group-major, zeros behind column DV
    OUT,  # [B, H, NQ, DV] original order
    LSE,  # [B, H, NQ] fp32
    ORDER,  # [B, H, NQ] int64
    OFFSETS,  # [B, H, CQ + 1] int64
    ENDS,  # [B, H, CQ + 1] int32: running number of row tiles
    KEY_TILES,  # [B, H, CQ, room, 3] int32
    COUNTS,  # [B, H, CQ, 2] int32
    SUMMARY_K,  # [B, H, CQ, T, D], or any pointer
    SUMMARY_V,  # [B, H, CQ, T, DV]
    SUMMARY_W,  # [B, H, CQ, T] fp32
    Y,  # [B, H, NQ, R] fp32, or any pointer
    BEND,  # [B, H, NQ] fp32
    SLOPE,  # [B, H, CQ, R, DV] fp32 or bf16
    H,
    shares,
    NQ,
    NK,
    CQ,
    T,
    R,
    room,
    tiles,
    sb,
    sh,
    sn,
    sd,
    scale,  # times log2(e), above 0
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    ROWS: tl.constexpr,  # of a tall tile
    LOW: tl.constexpr,
    SUMMARY: tl.constexpr,
    DRIFT: tl.constexpr,
    WIDE: tl.constexpr,  # offsets inside a head need 64 bits
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    at_head = head * (CQ + 1)
    group, start, stop = row_tile(ENDS + at_head, OFFSETS + at_head, NQ, CQ, pid % tiles, ROWS, LOW)
    if start >= stop:
        return
    index = start + tl.arange(0, BM)
    rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0)
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BDV)
    Q += head // H * sb + head % H * sh
    row_mask = (index < stop)[:, None]
    q = tl.load(Q + rows[:, None] * sn + dims[None, :] * sd, mask=row_mask & (dims < D)[None, :], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)

    row = head * CQ + group
    grouped = group < CQ  # rows of no group see nothing
    full = tl.load(COUNTS + row * 2, mask=grouped, other=0)
    cut = tl.load(COUNTS + row * 2 + 1, mask=grouped, other=0)
    kv_head = head // H * (H // shares) + head % H // shares
    K += kv_head * NK * BD
    V += kv_head * NK * BDV
    KEY_TILES += row * room * 3
    offsets = tl.arange(0, BN)
    for t in range(0, full):
        split = tl.load(KEY_TILES + t * 3 + 1)
        at = tl.where(offsets < split, tl.load(KEY_TILES + t * 3), tl.load(KEY_TILES + t * 3 + 2)) + offsets
        if WIDE:
            at = at.to(tl.int64)
        k = tl.load(K + at[None, :] * BD + dims[:, None])
        v = tl.load(V + at[:, None] * BDV + cols[None, :])
        scores = tl.dot(q, k, input_precision=PRECISION)
        top, total, acc = fold(scores, scale, v, top, total, acc, PRECISION)
    KEY_TILES += (room - 1) * 3
    for t in tl.range(0, cut, num_stages=1):
        word = tl.load(KEY_TILES - t * 3 + 1)
        live = offsets < word >> 16
        at = tl.where(offsets < (word & 65535), tl.load(KEY_TILES - t * 3), tl.load(KEY_TILES - t * 3 + 2))
        at = (at + offsets).to(tl.int64)
        k = tl.load(K + at[None, :] * BD + dims[:, None], mask=live[None, :], other=0.0)
        v = tl.load(V + at[:, None] * BDV + cols[None, :], mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(q, k, input_precision=PRECISION), -float("inf"))
        top, total, acc = fold(scores, scale, v, top, total, acc, PRECISION)

    if SUMMARY:
        before = top
        # columns that are only padding read column 0: they meet zeros of q, or are not stored
        own_dims = dims if BD == D else tl.where(dims < D, dims, 0)
        own_cols = cols if BDV == DV else tl.where(cols < DV, cols, 0)
        tail = tl.zeros([BM], tl.float32)  # the sum over the summary alone
        if DRIFT:
            rows = tl.load(
                ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_last"
            )
            bend = tl.load(BEND + head * NQ + rows, mask=index < stop, other=0.0) * 1.4426950408889634
            on = tl.zeros([], tl.int32)
        for t in tl.range(0, T, BT, num_stages=1):
            slots = t + tl.arange(0, BT)
            at = row * T + slots
            weight = tl.load(SUMMARY_W + at, mask=(slots < T) & grouped, other=-float("inf"))
            live = weight > -float("inf")
            k = tl.load(SUMMARY_K + at[None, :] * D + own_dims[:, None], mask=live[None, :], other=0.0)
            v = tl.load(SUMMARY_V + at[:, None] * DV + own_cols[None, :], mask=live[:, None], other=0.0)
            high = k.to(q.dtype)
            scores = tl.dot(q, high, input_precision=PRECISION)
            if SUMMARY_K.dtype.element_ty != q.dtype:
                # what the cast dropped: log-weights cancel against these products, so the digits matter
                scores = tl.dot(q, (k.to(tl.float32) - high.to(tl.float32)).to(q.dtype), scores)
            scores = scores * scale + weight[None, :] * 1.4426950408889634
            if DRIFT:
                scores += bend[:, None]
                on = tl.maximum(on, tl.max(live.to(tl.int32), 0))
            scores = tl.where(live[None, :], scores, -float("inf"))
            top, tail, acc = fold(scores, 1.0, v.to(V.dtype.element_ty), top, tail, acc, PRECISION)
        total = total * tl.exp2(before - tl.where(top == -float("inf"), 0.0, top)) + tail
        if DRIFT:
            # where every key is off, the drift may hold anything
            rank = tl.where(on > 0, R, 0)
            rows = tl.load(
                ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_last"
            )
            Y += (head * NQ + rows) * R
            SLOPE += row * R * DV
            if q.dtype == tl.float32:
                # another tl.dot makes the compiler hold q in registers, and spill
                for r in tl.range(0, rank, num_stages=1):
                    y = tl.load(Y + r, mask=index < stop, other=0.0) * tail
                    slope = tl.load(SLOPE + r * DV + own_cols).to(tl.float32)
                    acc += y[:, None] * slope[None, :]
            else:
                ranks = tl.arange(0, BR)
                own = ranks < rank
                y = tl.load(Y[:, None] + ranks[None, :], mask=row_mask & own[None, :], other=0.0)
                slope = tl.load(SLOPE + ranks[:, None] * DV + own_cols[None, :], mask=own[:, None], other=0.0)
                # tf32 has the range of fp32, and no fewer digits than the values
                acc = tl.dot(y * tail[:, None], slope.to(tl.float32), acc, input_precision="tf32")

    # nothing kept: 0 and -inf. A sum of 0 over kept keys is dense attention's 0 / 0 and stays NaN
    empty = (full + cut == 0) & (total == 0.0)
    acc /= tl.where(empty, 1.0, total)[:, None]
    lse = (tl.where(empty, 0.0, top) + tl.log2(total)) * 0.6931471805599453
    OUT += head * NQ * DV
    # read again rather than held in registers through the loop
    rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_first")
    tl.store(
        OUT + rows[:, None] * DV + cols[None, :],
        acc.to(OUT.dtype.element_ty),
        mask=row_mask & (cols < DV)[None, :],
    )
    tl.store(LSE + head * NQ + rows, lse, mask=index < stop)


def tiles_for(width: int, dtype: torch.dtype, summary: bool, ragged: bool = False) -> Tiles:
    """Tile sizes without spills that fit every supported GPU; the compile gate proves it."""
    if dtype == torch.float32:
        if width <= 64:
            return Tiles(64, 32, 8, 2)
        return Tiles(16 if summary and width <= 128 else 32, 16, 8, 2 if width <= 128 else 1)
    if width <= 128:
        # rows that end inside a block of 16 columns are addressed column by column, which takes registers
        return Tiles(64 if summary and ragged else 128, 64, 8, 3)
    # the two parts of a summary key of 256 columns leave registers for few rows only
    return Tiles(16 if summary else 32, 32, 8, 2)


def low_tiles(size: Tiles) -> Tiles | None:
    """Tiles for what is left of a query group below half a tall tile; None where that saves nothing. Before
    sm_90 the compiler would spread the columns of a low tile over the warps, at half the speed."""
    if size.rows < 128 or architecture() not in WARP_GROUP_GPUS:
        return None
    return Tiles(size.rows // 2, size.keys, size.warps // 2, size.stages)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    route: Route,
    scale: float,
    summary: SummaryKeys | None,
    out_dtype: torch.dtype | None,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """q [B, H, Nq, D], keys and values [B, Hkv, Nk, padded] group-major -> out [B, H, Nq, Dv] in the original
    order, log-sum-exp [B, H, Nq] fp32; no host synchronisation"""
    batch, heads, count, dim = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty(batch, heads, count, value_dim, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(batch, heads, count, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    width = max(padded(dim), padded(value_dim))
    drift = summary.drift if summary is not None else None
    ragged = (dim % 16 or value_dim % 16) > 0
    size = tiles_for(width, q.dtype, summary is not None, ragged)
    low = low_tiles(size)
    schedule = schedule_tiles(route, size.rows, size.keys, low is not None)
    weighted = (summary.keys, summary.values, summary.log_weight) if summary is not None else (q, q, q)
    moved = (*drift_rows(q, drift, route.query), drift.slope) if drift is not None else (q, q, q)
    rank = drift.basis.shape[-1] if drift is not None else 0
    q, scale = positive_scale(q, scale)
    for tile, ends in ((size, schedule.tall_ends), (low, schedule.low_ends)):
        if tile is None or ends is None:
            continue
        tiles = schedule.row_tiles(count, low=ends is schedule.low_ends)
        attend_kernel[(batch * heads * tiles,)](
            q,
            keys,
            values,
            out,
            lse,
            route.query.order.contiguous(),
            route.query.offsets.contiguous(),
            ends,
            schedule.key_tiles,
            schedule.counts,
            *(t.contiguous() if summary is not None else t for t in weighted),
            *(t.contiguous() if drift is not None else t for t in moved),
            heads,
            heads // kv_heads,
            count,
            keys.shape[2],
            route.cells.shape[2],
            summary.keys.shape[3] if summary is not None else 0,
            rank,
            schedule.key_tiles.shape[3],
            tiles,
            *q.stride(),
            scale * math.log2(math.e),
            D=dim,
            DV=value_dim,
            BM=tile.rows,
            BN=tile.keys,
            BD=padded(dim),
            BDV=padded(value_dim),
            BT=16,
            BR=padded(max(1, rank)),
            ROWS=size.rows,
            LOW=tile is low,
            SUMMARY=summary is not None and summary.keys.shape[3] > 0,
            DRIFT=drift is not None,
            WIDE=keys.shape[2] * width >= 1 << 31,
            PRECISION=precision(q.dtype, width),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, lse

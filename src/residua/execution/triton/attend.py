"""Variable-block sparse attention: one program per tile of query rows walks the merged K/V runs of its group.

A tile never crosses a query group. The runs of a group are walked in a single flat loop, tile of keys after
tile of keys, so that the compiler can overlap the loads of the next tile with the work on this one.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import ExtraKeys, Route
from .drift import drift_rows
from .permute import gather_rows
from .schedule import schedule_tiles
from .shapes import Tiles, padded, precision
from .softmax import fold


@triton.jit
def attend_kernel(
    Q,  # [B, H, NQ, D] strided, original order
    K,  # [B, Hkv, NK, D] group-major
    V,  # [B, Hkv, NK, DV] group-major
    OUT,  # [B, H, NQ, DV] original order
    LSE,  # [B, H, NQ] fp32
    ORDER,  # [B, H, NQ] int64
    RUNS,  # [B, H, CQ, room, 2] int32
    KEY_TILES,  # [B, H, CQ] int32
    TILE_GROUP,  # [B, H, tiles] int32
    TILE_START,  # [B, H, tiles] int32
    TILE_STOP,  # [B, H, tiles] int32
    EXTRA_K,  # [B, H, CQ, T, D], or any pointer
    EXTRA_V,  # [B, H, CQ, T, DV]
    EXTRA_W,  # [B, H, CQ, T] fp32
    Y,  # [B, H, NQ, R] fp32, or any pointer
    BEND,  # [B, H, NQ] fp32
    SLOPE,  # [B, H, CQ, R, DV] fp32
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
    scale,  # times log2(e)
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    EXTRA: tl.constexpr,
    DRIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    group = tl.load(TILE_GROUP + pid)
    start = tl.load(TILE_START + pid)
    stop = tl.load(TILE_STOP + pid)
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
    key_tiles = tl.load(KEY_TILES + row, mask=grouped, other=0)
    kv_head = head // H * (H // shares) + head % H // shares
    K += kv_head * NK * D
    V += kv_head * NK * DV
    RUNS += row * room * 2
    done = tl.zeros([], tl.int32)  # keys of the current run that earlier tiles took
    offsets = tl.arange(0, BN)
    # a tile is near its base: offsets inside it fit in 32 bits, the base needs 64
    k_tile = offsets[None, :] * D + dims[:, None]
    v_tile = offsets[:, None] * DV + cols[None, :]
    for _ in range(0, key_tiles):
        first = tl.load(RUNS) + done
        end = tl.load(RUNS + 1)
        live = first + offsets < end
        k_mask = live[None, :] if BD == D else live[None, :] & (dims < D)[:, None]
        v_mask = live[:, None] if BDV == DV else live[:, None] & (cols < DV)[None, :]
        k = tl.load(K + first.to(tl.int64) * D + k_tile, mask=k_mask, other=0.0)
        v = tl.load(V + first.to(tl.int64) * DV + v_tile, mask=v_mask, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(live[None, :], scores, -float("inf"))
        top, total, acc = fold(scores, v, top, total, acc, PRECISION)
        last = first + BN >= end
        done = tl.where(last, 0, done + BN)
        RUNS += tl.where(last, 2, 0)

    if EXTRA:
        before = top
        tail = tl.zeros([BM], tl.float32)  # the sum over the extra keys alone
        if DRIFT:
            rows = tl.load(
                ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_last"
            )
            bend = tl.load(BEND + head * NQ + rows, mask=index < stop, other=0.0) * 1.4426950408889634
            on = tl.zeros([], tl.int32)
        for t in tl.range(0, T, BT, num_stages=1):
            slots = t + tl.arange(0, BT)
            at = row * T + slots
            weight = tl.load(EXTRA_W + at, mask=(slots < T) & grouped, other=-float("inf"))
            live = weight > -float("inf")
            k = tl.load(
                EXTRA_K + at[None, :] * D + dims[:, None], mask=live[None, :] & (dims < D)[:, None], other=0.0
            )
            v = tl.load(
                EXTRA_V + at[:, None] * DV + cols[None, :],
                mask=live[:, None] & (cols < DV)[None, :],
                other=0.0,
            )
            high = k.to(q.dtype)
            scores = tl.dot(q, high, input_precision=PRECISION)
            if EXTRA_K.dtype.element_ty != q.dtype:
                # what the cast dropped: log-weights cancel against these products, so the digits matter
                scores = tl.dot(q, (k.to(tl.float32) - high.to(tl.float32)).to(q.dtype), scores)
            scores = scores * scale + weight[None, :] * 1.4426950408889634
            if DRIFT:
                scores += bend[:, None]
                on = tl.maximum(on, tl.max(live.to(tl.int32), 0))
            scores = tl.where(live[None, :], scores, -float("inf"))
            top, tail, acc = fold(scores, v.to(V.dtype.element_ty), top, tail, acc, PRECISION)
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
                    slope = tl.load(SLOPE + r * DV + cols, mask=cols < DV, other=0.0)
                    acc += y[:, None] * slope[None, :]
            else:
                ranks = tl.arange(0, BR)
                own = ranks < rank
                y = tl.load(Y[:, None] + ranks[None, :], mask=row_mask & own[None, :], other=0.0)
                slope_mask = own[:, None] & (cols < DV)[None, :]
                slope = tl.load(SLOPE + ranks[:, None] * DV + cols[None, :], mask=slope_mask, other=0.0)
                # tf32 has the range of fp32, and no fewer digits than the values
                acc = tl.dot(y * tail[:, None], slope, acc, input_precision="tf32")

    # nothing kept: 0 and -inf. A sum of 0 over kept keys is dense attention's 0 / 0 and stays NaN
    empty = (key_tiles == 0) & (total == 0.0)
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


def tiles_for(width: int, dtype: torch.dtype, extra: bool, drift: bool) -> Tiles:
    """Tile sizes without spills that fit every supported GPU; the compile gate proves it."""
    if dtype == torch.float32:
        if width <= 64:
            return Tiles(64, 32, 8, 2)
        return Tiles(16 if drift and width <= 128 else 32, 16, 8, 2 if width <= 128 else 1)
    if width <= 128:
        return Tiles(128, 64, 8, 3)
    # the two parts of an extra key of 256 columns leave registers for few rows only
    return Tiles(16 if extra else 64, 32, 8, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Route,
    scale: float,
    extra: ExtraKeys | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """-> out [B, H, Nq, Dv] in the original order, log-sum-exp [B, H, Nq] fp32; no host synchronisation"""
    batch, heads, count, dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[-1]
    out = torch.empty(batch, heads, count, value_dim, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(batch, heads, count, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    width = max(padded(dim), padded(value_dim))
    drift = extra.drift if extra is not None else None
    size = tiles_for(width, q.dtype, extra is not None, drift is not None)
    schedule = schedule_tiles(route, size.rows, size.keys)
    tiles = schedule.tile_group.shape[-1]
    weighted = (extra.keys, extra.values, extra.log_weight) if extra is not None else (q, q, q)
    moved = (*drift_rows(q, drift, route.query), drift.slope) if drift is not None else (q, q, q)
    rank = drift.basis.shape[-1] if drift is not None else 0
    attend_kernel[(batch * heads * tiles,)](
        q,
        gather_rows(k, route.kv.order),
        gather_rows(v, route.kv.order),
        out,
        lse,
        route.query.order.contiguous(),
        schedule.runs,
        schedule.key_tiles,
        schedule.tile_group,
        schedule.tile_start,
        schedule.tile_stop,
        *(t.contiguous() if extra is not None else t for t in weighted),
        *(t.float().contiguous() if drift is not None else t for t in moved),
        heads,
        heads // kv_heads,
        count,
        k.shape[2],
        route.cells.shape[2],
        extra.keys.shape[3] if extra is not None else 0,
        rank,
        schedule.runs.shape[3],
        tiles,
        *q.stride(),
        scale * math.log2(math.e),
        D=dim,
        DV=value_dim,
        BM=size.rows,
        BN=size.keys,
        BD=padded(dim),
        BDV=padded(value_dim),
        BT=16,
        BR=padded(max(1, rank)),
        EXTRA=extra is not None and extra.keys.shape[3] > 0,
        DRIFT=drift is not None,
        PRECISION=precision(q.dtype, width),
        num_warps=size.warps,
        num_stages=size.stages,
    )
    return out, lse

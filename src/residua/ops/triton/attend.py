"""Variable-block sparse attention: one program per tile of query rows walks the key tiles of its query group.

Which keys make up a tile is decided beforehand (schedule.py). Most tiles are full, so the loop over them has
no mask; the few that are cut come after it, then the summary of what is skipped.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import MAX_BEND, Route, SummaryKeys
from .attend_tiles import columns_of, finds_drift, low_tiles, tiles_for
from .constants import LN_2, LOG2_E, SPLIT_BITS, SPLIT_MASK
from .drift import drift_rows
from .schedule import schedule_tiles, tile_group, tile_rows
from .shapes import padded, positive_scale, precision
from .softmax import weigh


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
    KEY_TILES,  # [B, H, CQ, room, 4] int32
    COUNTS,  # [B, H, CQ, 2] int32
    SUMMARY_K,  # [B, H, CQ, T, D], or any pointer
    SUMMARY_V,  # [B, H, CQ, T, DV]
    SUMMARY_W,  # [B, H, CQ, T] fp32
    Y,  # [B, H, NQ, R] fp32, or any pointer
    BEND,  # [B, H, NQ] fp32
    BASIS,  # [B, Hkv, D, R] fp32, read if the kernel finds Y and BEND itself
    ORIGIN,  # [B, H, CQ, R] fp32
    CURVE,  # [B, H, CQ, R] fp32
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
    most,  # of BEND
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BC: tl.constexpr,  # columns of an accumulator: BDV, or half of it
    BT: tl.constexpr,
    BR: tl.constexpr,
    ROWS: tl.constexpr,  # of a tall tile
    LOW: tl.constexpr,
    SUMMARY: tl.constexpr,
    DRIFT: tl.constexpr,
    MOVES: tl.constexpr,  # whether the kernel finds Y and BEND itself
    WIDE: tl.constexpr,  # offsets inside a head need 64 bits
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    ENDS += head * (CQ + 1)
    OFFSETS += head * (CQ + 1)
    group = tile_group(ENDS, CQ, pid % tiles)
    start, stop = tile_rows(ENDS, OFFSETS, NQ, CQ, group, pid % tiles, ROWS, LOW, "")
    if start >= stop:
        return
    index = start + tl.arange(0, BM)
    rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0)
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BC)
    Q += head // H * sb + head % H * sh
    row_mask = (index < stop)[:, None]
    q = tl.load(Q + rows[:, None] * sn + dims[None, :] * sd, mask=row_mask & (dims < D)[None, :], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BC], tl.float32)
    if BC < BDV:  # a dot of more columns than rows would be spread over the warps by columns
        right = tl.zeros([BM, BC], tl.float32)

    row = head * CQ + group
    grouped = group < CQ  # rows of no group see nothing
    full = tl.load(COUNTS + row * 2, mask=grouped, other=0)
    cut = tl.load(COUNTS + row * 2 + 1, mask=grouped, other=0)
    kv_head = head // H * (H // shares) + head % H // shares
    K += kv_head * NK * BD
    V += kv_head * NK * BDV
    KEY_TILES += row * room * 4
    offsets = tl.arange(0, BN)
    for t in range(0, full):
        split = tl.load(KEY_TILES + t * 4 + 1)
        at = tl.where(offsets < split, tl.load(KEY_TILES + t * 4), tl.load(KEY_TILES + t * 4 + 2)) + offsets
        if WIDE:
            at = at.to(tl.int64)
        k = tl.load(K + at[None, :] * BD + dims[:, None])
        v = tl.load(V + at[:, None] * BDV + cols[None, :])
        scores = tl.dot(q, k, input_precision=PRECISION)
        p, fade, top, total = weigh(scores, scale, top, total)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        if BC < BDV:
            v = tl.load(V + at[:, None] * BDV + BC + cols[None, :])
            right = tl.dot(p.to(v.dtype), v, right * fade[:, None], input_precision=PRECISION)
    KEY_TILES += (room - 1) * 4
    for t in tl.range(0, cut, num_stages=1):
        word = tl.load(KEY_TILES - t * 4 + 1)
        live = offsets < (word >> (2 * SPLIT_BITS))
        last = offsets >= (word >> SPLIT_BITS & SPLIT_MASK)
        at = tl.where(last, tl.load(KEY_TILES - t * 4 + 3), tl.load(KEY_TILES - t * 4 + 2))
        at = tl.where(offsets < (word & SPLIT_MASK), tl.load(KEY_TILES - t * 4), at)
        at = (at + offsets).to(tl.int64)
        k = tl.load(K + at[None, :] * BD + dims[:, None], mask=live[None, :], other=0.0)
        v = tl.load(V + at[:, None] * BDV + cols[None, :], mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(q, k, input_precision=PRECISION), -float("inf"))
        p, fade, top, total = weigh(scores, scale, top, total)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        if BC < BDV:
            v = tl.load(V + at[:, None] * BDV + BC + cols[None, :], mask=live[:, None], other=0.0)
            right = tl.dot(p.to(v.dtype), v, right * fade[:, None], input_precision=PRECISION)

    # read again rather than held in registers through the loops
    start, stop = tile_rows(ENDS, OFFSETS, NQ, CQ, group, pid % tiles, ROWS, LOW, "evict_first")
    index = start + tl.arange(0, BM)
    row_mask = (index < stop)[:, None]
    if SUMMARY:
        before = top
        tail = tl.zeros([BM], tl.float32)  # the sum over the summary alone
        if MOVES:
            ranks = tl.arange(0, BR)
            BASIS += (dims[:, None] * R + ranks[None, :]) + kv_head * D * R
            basis = tl.load(BASIS, mask=(dims < D)[:, None] & (ranks < R)[None, :], other=0.0)
            y = tl.zeros([BM, BR], tl.float32)
            for _ in tl.static_range(3):  # three parts of 16 bits hold all digits of the basis
                part = basis.to(q.dtype)
                y = tl.dot(q, part, y)
                basis -= part.to(tl.float32)
            used = (ranks < R) & grouped
            y -= tl.load(ORIGIN + row * R + ranks, mask=used, other=0.0)[None, :]
            curve = tl.load(CURVE + row * R + ranks, mask=used, other=0.0)
            bend = tl.sum(y * y * curve[None, :], 1)
            bend = tl.where(bend > most, most, bend) * LOG2_E  # NaN stays
            on = tl.zeros([], tl.int32)
        elif DRIFT:
            rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_last")
            bend = tl.load(BEND + head * NQ + rows, mask=index < stop, other=0.0) * LOG2_E
            on = tl.zeros([], tl.int32)
        for t in tl.range(0, T, BT, num_stages=1, disable_licm=not DRIFT):
            slots = t + tl.arange(0, BT)
            at = row * T + slots
            weight = tl.load(SUMMARY_W + at, mask=(slots < T) & grouped, other=-float("inf"))
            live = weight > -float("inf")
            own = live[None, :] & (dims < D)[:, None]
            k = tl.load(SUMMARY_K + at[None, :] * D + dims[:, None], mask=own, other=0.0)
            own = live[:, None] & (cols < DV)[None, :]
            v = tl.load(SUMMARY_V + at[:, None] * DV + cols[None, :], mask=own, other=0.0)
            scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
            if SUMMARY_K.dtype.element_ty != q.dtype:
                # what the cast dropped: log-weights cancel against these products, so the digits matter. Read
                # again rather than held in registers
                own = live[None, :] & (dims < D)[:, None]
                again = SUMMARY_K + at[None, :] * D + dims[:, None]
                k = tl.load(again, mask=own, other=0.0, eviction_policy="evict_first").to(tl.float32)
                scores = tl.dot(q, (k - k.to(q.dtype).to(tl.float32)).to(q.dtype), scores)
            scores = scores * scale + weight[None, :] * LOG2_E
            if DRIFT:
                scores += bend[:, None]
                on = tl.maximum(on, tl.max(live.to(tl.int32), 0))
            scores = tl.where(live[None, :], scores, -float("inf"))
            p, fade, top, tail = weigh(scores, 1.0, top, tail)
            p, v = p.to(V.dtype.element_ty), v.to(V.dtype.element_ty)
            acc = tl.dot(p, v, acc * fade[:, None], input_precision=PRECISION)
            if BC < BDV:
                own = live[:, None] & (BC + cols < DV)[None, :]
                v = tl.load(SUMMARY_V + at[:, None] * DV + BC + cols[None, :], mask=own, other=0.0)
                v = v.to(V.dtype.element_ty)
                right = tl.dot(p, v, right * fade[:, None], input_precision=PRECISION)
        total = total * tl.exp2(before - tl.where(top == -float("inf"), 0.0, top)) + tail
        if DRIFT:
            # where every key is off, the drift may hold anything
            rank = tl.where(on > 0, R, 0)
            SLOPE += row * R * DV
            if not MOVES:
                rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_last")
                Y += (head * NQ + rows) * R
            if q.dtype == tl.float32:
                # another tl.dot makes the compiler hold q in registers, and spill
                for r in tl.range(0, rank, num_stages=1):
                    y = tl.load(Y + r, mask=index < stop, other=0.0) * tail
                    slope = tl.load(SLOPE + r * DV + cols, mask=cols < DV, other=0.0).to(tl.float32)
                    acc += y[:, None] * slope[None, :]
            else:
                ranks = tl.arange(0, BR)
                own = (ranks < rank)[:, None]
                if MOVES:
                    y = tl.where((ranks < rank)[None, :], y, 0.0)
                else:
                    own_rows = row_mask & (ranks < rank)[None, :]
                    y = tl.load(Y[:, None] + ranks[None, :], mask=own_rows, other=0.0)
                y = y * tail[:, None]
                SLOPE += ranks[:, None] * DV + cols[None, :]
                slope = tl.load(SLOPE, mask=own & (cols < DV)[None, :], other=0.0)
                # tf32 has the range of fp32, and no fewer digits than the values
                acc = tl.dot(y, slope.to(tl.float32), acc, input_precision="tf32")
                if BC < BDV:
                    slope = tl.load(SLOPE + BC, mask=own & (BC + cols < DV)[None, :], other=0.0)
                    right = tl.dot(y, slope.to(tl.float32), right, input_precision="tf32")

    # nothing kept: 0 and -inf. A sum of 0 over kept keys is dense attention's 0 / 0 and stays NaN
    empty = (full + cut == 0) & (total == 0.0)
    lse = (tl.where(empty, 0.0, top) + tl.log2(total)) * LN_2
    total = tl.where(empty, 1.0, total)
    acc /= total[:, None]
    OUT += head * NQ * DV
    # read again rather than held in registers through the loop
    rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_first")
    tl.store(
        OUT + rows[:, None] * DV + cols[None, :], acc.to(OUT.dtype.element_ty), mask=row_mask & (cols < DV)[None, :]
    )
    if BC < BDV:
        right /= total[:, None]
        cols += BC
        tl.store(
            OUT + rows[:, None] * DV + cols[None, :],
            right.to(OUT.dtype.element_ty),
            mask=row_mask & (cols < DV)[None, :],
        )
    tl.store(LSE + head * NQ + rows, lse, mask=index < stop)


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
    size = tiles_for(width, q.dtype, summary is not None)
    low = low_tiles(size)
    schedule = schedule_tiles(route, size.rows, size.keys, low is not None)
    weighted = (summary.keys, summary.values, summary.log_weight) if summary is not None else (q, q, q)
    # A scale that is not above 0 is taken over by q below, and the drift is that of q as it is.
    moves = drift is not None and scale > 0 and finds_drift(width, q.dtype)
    moved: tuple[Tensor, ...] = (q,) * 6
    if drift is not None:
        y, bend = (drift.slope,) * 2 if moves else drift_rows(q, drift, route.query)
        placed = (x.float() for x in (drift.basis, drift.origin, drift.curve))
        moved = tuple(x.contiguous() for x in (y, bend, *placed, drift.slope))
    rank = drift.basis.shape[-1] if drift is not None else 0
    q, scale = positive_scale(q, scale)
    for tile, ends in ((size, schedule.tall_ends), (low, schedule.low_ends)):
        if tile is None or ends is None:
            continue
        if low is not None and tile is size and count <= low.rows:  # no group has rows for a tall tile
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
            *moved,
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
            scale * LOG2_E.value,
            MAX_BEND,
            D=dim,
            DV=value_dim,
            BM=tile.rows,
            BN=tile.keys,
            BD=padded(dim),
            BDV=padded(value_dim),
            BC=columns_of(tile, tile is low, padded(value_dim)),
            BT=16,
            BR=padded(max(1, rank)),
            ROWS=size.rows,
            LOW=tile is low,
            SUMMARY=summary is not None and summary.keys.shape[3] > 0,
            DRIFT=drift is not None,
            MOVES=moves,
            WIDE=keys.shape[2] * width >= 1 << 31,
            PRECISION=precision(q.dtype, width),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, lse

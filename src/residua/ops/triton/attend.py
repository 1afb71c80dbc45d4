"""Variable-block sparse attention: one program per tile of query rows walks the key tiles of its query group.

Which keys make up a tile is decided beforehand (schedule.py). Most tiles are full, so the loop over them has
no mask; the few that are cut come after it, then the summary of what is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import MAX_BEND, Route, SummaryKeys
from .attend_tiles import columns_of, finds_drift, low_tiles, tiles_for
from .device_functions import LN_2, LOG2_E, head_start, kv_head_of, load_rows, softmax_step, store_rows
from .drift import drift_rows
from .schedule import SPLIT_BITS, SPLIT_MASK, schedule_tiles, tile_group, tile_rows
from .shapes import padded, positive_scale, precision


@triton.jit
def kept_tile(q, K, V, at, live, scale, top, total, acc, right, BDV, PRECISION):
    """One tile of kept keys: rows `at` [BN] of K [N, BD] and V [N, BDV], those that are `live`, or all if that is None.

    -> the running maximum, total and weighted values [BM, BC]; `right` holds the columns from BC on, if BC < BDV.
    """
    BD: tl.constexpr = q.shape[1]
    BC: tl.constexpr = acc.shape[1]
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BC)
    # load and score
    if live is None:
        k = tl.load(K + at[None, :] * BD + dims[:, None])
        v = tl.load(V + at[:, None] * BDV + cols[None, :])
        scores = tl.dot(q, k, input_precision=PRECISION)
    else:
        k = tl.load(K + at[None, :] * BD + dims[:, None], mask=live[None, :], other=0.0)
        v = tl.load(V + at[:, None] * BDV + cols[None, :], mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(q, k, input_precision=PRECISION), -float("inf"))
    # online softmax: weights, and the sums so far rescaled to the new maximum
    p, rescale, top, total = softmax_step(scores, scale, top, total)
    # weighted values
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    if BC < BDV:
        if live is None:
            v = tl.load(V + at[:, None] * BDV + BC + cols[None, :])
        else:
            v = tl.load(V + at[:, None] * BDV + BC + cols[None, :], mask=live[:, None], other=0.0)
        right = tl.dot(p.to(v.dtype), v, right * rescale[:, None], input_precision=PRECISION)
    return top, total, acc, right


@triton.jit
def kept_keys(q, K, V, KEY_TILES, counts, room, scale, top, total, acc, right, BN, BDV, WIDE, PRECISION):
    """All kept keys of a query group. Of KEY_TILES [room, 4] the first counts[0] are full tiles, the last counts[1] cut
    ones."""
    offsets = tl.arange(0, BN)
    for t in range(0, counts[0]):
        # one or two runs of keys: the second one begins at the split
        split = tl.load(KEY_TILES + t * 4 + 1)
        at = tl.where(offsets < split, tl.load(KEY_TILES + t * 4), tl.load(KEY_TILES + t * 4 + 2)) + offsets
        if WIDE:
            at = at.to(tl.int64)
        top, total, acc, right = kept_tile(q, K, V, at, None, scale, top, total, acc, right, BDV, PRECISION)
    LAST = KEY_TILES + (room - 1) * 4
    for t in tl.range(0, counts[1], num_stages=1):
        # up to three runs, and an end: one word holds where the second and the third begin, and how many keys there are
        word = tl.load(LAST - t * 4 + 1)
        live = offsets < (word >> (2 * SPLIT_BITS))
        last = offsets >= (word >> SPLIT_BITS & SPLIT_MASK)
        at = tl.where(last, tl.load(LAST - t * 4 + 3), tl.load(LAST - t * 4 + 2))
        at = tl.where(offsets < (word & SPLIT_MASK), tl.load(LAST - t * 4), at)
        at = (at + offsets).to(tl.int64)
        top, total, acc, right = kept_tile(q, K, V, at, live, scale, top, total, acc, right, BDV, PRECISION)
    return top, total, acc, right


@triton.jit
def find_drift(q, BASIS, start, ORIGIN, CURVE, R, max_bend, known, D, BR):
    """Where the rows q [BM, BD] lie relative to their anchor, y = q @ basis - origin [BM, BR], and by how much the
    log-weights of their summary keys bend, min(sum(y^2 curve), max_bend) [BM] in base 2. The basis of the head begins
    at `start`; an origin and a curve that are not `known` are 0."""
    dims = tl.arange(0, q.shape[1])
    ranks = tl.arange(0, BR)
    BASIS += (dims[:, None] * R + ranks[None, :]) + start
    basis = tl.load(BASIS, mask=(dims < D)[:, None] & (ranks < R)[None, :], other=0.0)
    y = tl.zeros([q.shape[0], BR], tl.float32)
    for _ in tl.static_range(3):  # three parts of 16 bits hold all digits of the basis
        part = basis.to(q.dtype)
        y = tl.dot(q, part, y)
        basis -= part.to(tl.float32)
    used = (ranks < R) & known
    y -= tl.load(ORIGIN + ranks, mask=used, other=0.0)[None, :]
    curve = tl.load(CURVE + ranks, mask=used, other=0.0)
    bend = tl.sum(y * y * curve[None, :], 1)
    return y, tl.where(bend > max_bend, max_bend, bend) * LOG2_E  # NaN stays


@triton.jit
def summary_tile(q, V, KEYS, VALUES, at, weight, bend, scale, top, summary, acc, right, D, DV, BDV, PRECISION):
    """One tile of summary keys: entries `at` [BT] of KEYS [.., D] and VALUES [.., DV]; a log-weight of -inf switches a
    key off. `summary` is the running total of the summary alone. Products are in the dtypes of q and V."""
    value_type = V.dtype.element_ty
    BC: tl.constexpr = acc.shape[1]
    dims = tl.arange(0, q.shape[1])
    cols = tl.arange(0, BC)
    live = weight > -float("inf")
    # load and score
    own = live[None, :] & (dims < D)[:, None]
    k = tl.load(KEYS + at[None, :] * D + dims[:, None], mask=own, other=0.0)
    own = live[:, None] & (cols < DV)[None, :]
    v = tl.load(VALUES + at[:, None] * DV + cols[None, :], mask=own, other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
    if KEYS.dtype.element_ty != q.dtype:
        # what the cast dropped: log-weights cancel against these products, so the digits matter. Read
        # again rather than held in registers
        own = live[None, :] & (dims < D)[:, None]
        again = KEYS + at[None, :] * D + dims[:, None]
        k = tl.load(again, mask=own, other=0.0, eviction_policy="evict_first").to(tl.float32)
        scores = tl.dot(q, (k - k.to(q.dtype).to(tl.float32)).to(q.dtype), scores)
    # log-weights, which bend with the row
    scores = scores * scale + weight[None, :] * LOG2_E
    if bend is not None:
        scores += bend[:, None]
    scores = tl.where(live[None, :], scores, -float("inf"))
    # online softmax, weighted values
    p, rescale, top, summary = softmax_step(scores, 1.0, top, summary)
    p, v = p.to(value_type), v.to(value_type)
    acc = tl.dot(p, v, acc * rescale[:, None], input_precision=PRECISION)
    if BC < BDV:
        own = live[:, None] & (cols + BC < DV)[None, :]
        v = tl.load(VALUES + at[:, None] * DV + BC + cols[None, :], mask=own, other=0.0)
        right = tl.dot(p, v.to(value_type), right * rescale[:, None], input_precision=PRECISION)
    return top, summary, acc, right, live


@triton.jit
def add_drift(y, SLOPE, rank, acc, right, DV, BDV):
    """The values of the summary change by y @ slope: y [BM, BR], already times the total of the summary, and the first
    `rank` rows of SLOPE [R, DV]."""
    BC: tl.constexpr = acc.shape[1]
    ranks = tl.arange(0, y.shape[1])
    cols = tl.arange(0, BC)
    own = (ranks < rank)[:, None]
    SLOPE += ranks[:, None] * DV + cols[None, :]
    slope = tl.load(SLOPE, mask=own & (cols < DV)[None, :], other=0.0)
    # tf32 has the range of fp32, and no fewer digits than the values
    acc = tl.dot(y, slope.to(tl.float32), acc, input_precision="tf32")
    if BC < BDV:
        slope = tl.load(SLOPE + BC, mask=own & (cols + BC < DV)[None, :], other=0.0)
        right = tl.dot(y, slope.to(tl.float32), right, input_precision="tf32")
    return acc, right


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
    SUMMARY_K,  # [B, H, CQ, T, D], or None
    SUMMARY_V,  # [B, H, CQ, T, DV], or None
    SUMMARY_W,  # [B, H, CQ, T] fp32, or None
    Y,  # [B, H, NQ, R] fp32, or None: without a drift, or if the kernel finds Y and BEND itself
    BEND,  # [B, H, NQ] fp32, or None
    BASIS,  # [B, Hkv, D, R] fp32, or None
    ORIGIN,  # [B, H, CQ, R] fp32, or None
    CURVE,  # [B, H, CQ, R] fp32, or None
    SLOPE,  # [B, H, CQ, R, DV] fp32 or bf16, or None: without a drift
    H,
    heads_per_kv,
    NQ,
    NK,
    CQ,
    T,
    R,
    room,
    tiles,
    strides,  # of Q
    scale,  # times log2(e), above 0
    max_bend,
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
    """One program: at most BM rows of one query group of one head. They attend to the keys of the group's kept cells
    and to its summary keys. Writes their output and log-sum-exp, in the original order of the rows."""
    # the row tile: its query group, its rows, their queries
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
    cols = tl.arange(0, BC)
    q = load_rows(head_start(Q, strides, head, H), strides, rows, tl.arange(0, BD), index < stop, D)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BC], tl.float32)
    right = acc  # a dot of more columns than rows would be spread over the warps by columns: then there are two halves

    # the kept keys
    row = head * CQ + group
    grouped = group < CQ  # rows of no group see nothing
    full = tl.load(COUNTS + row * 2, mask=grouped, other=0)
    cut = tl.load(COUNTS + row * 2 + 1, mask=grouped, other=0)
    kv_head = kv_head_of(head, H, heads_per_kv)
    K += kv_head * NK * BD
    V += kv_head * NK * BDV
    KEY_TILES += row * room * 4
    top, total, acc, right = kept_keys(
        q, K, V, KEY_TILES, (full, cut), room, scale, top, total, acc, right, BN, BDV, WIDE, PRECISION
    )

    # read again rather than held in registers through the loops
    start, stop = tile_rows(ENDS, OFFSETS, NQ, CQ, group, pid % tiles, ROWS, LOW, "evict_first")
    index = start + tl.arange(0, BM)
    if SUMMARY:
        # how the summary of this group drifts from row to row
        bend = None
        if MOVES:
            origin, curve = ORIGIN + row * R, CURVE + row * R
            y, bend = find_drift(q, BASIS, kv_head * D * R, origin, curve, R, max_bend, grouped, D, BR)
        elif DRIFT:
            rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_last")
            bend = tl.load(BEND + head * NQ + rows, mask=index < stop, other=0.0) * LOG2_E
        # the summary keys, BT at a time, with a total of their own
        before = top
        summary = tl.zeros([BM], tl.float32)
        any_on = tl.zeros([], tl.int32)
        for t in tl.range(0, T, BT, num_stages=1, disable_licm=not DRIFT):
            slots = t + tl.arange(0, BT)
            at = row * T + slots
            weight = tl.load(SUMMARY_W + at, mask=(slots < T) & grouped, other=-float("inf"))
            top, summary, acc, right, live = summary_tile(
                q, V, SUMMARY_K, SUMMARY_V, at, weight, bend, scale, top, summary, acc, right, D, DV, BDV, PRECISION
            )
            if DRIFT:
                any_on = tl.maximum(any_on, tl.max(live.to(tl.int32), 0))
        # both totals joined: that of the kept keys rescaled to the new maximum
        total = total * tl.exp2(before - tl.where(top == -float("inf"), 0.0, top)) + summary
        # the drift of the values
        if DRIFT:
            # where every key is off, the drift may hold anything
            rank = tl.where(any_on > 0, R, 0)
            SLOPE += row * R * DV
            if not MOVES:
                rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_last")
                Y += (head * NQ + rows) * R
            if q.dtype == tl.float32:
                # another tl.dot makes the compiler hold q in registers, and spill
                for r in tl.range(0, rank, num_stages=1):
                    y = tl.load(Y + r, mask=index < stop, other=0.0) * summary
                    slope = tl.load(SLOPE + r * DV + cols, mask=cols < DV, other=0.0).to(tl.float32)
                    acc += y[:, None] * slope[None, :]
            else:
                ranks = tl.arange(0, BR)
                if MOVES:
                    y = tl.where((ranks < rank)[None, :], y, 0.0)
                else:
                    own_rows = (index < stop)[:, None] & (ranks < rank)[None, :]
                    y = tl.load(Y[:, None] + ranks[None, :], mask=own_rows, other=0.0)
                acc, right = add_drift(y * summary[:, None], SLOPE, rank, acc, right, DV, BDV)

    # nothing kept: 0 and -inf. A sum of 0 over kept keys is dense attention's 0 / 0 and stays NaN
    empty = (full + cut == 0) & (total == 0.0)
    lse = (tl.where(empty, 0.0, top) + tl.log2(total)) * LN_2
    total = tl.where(empty, 1.0, total)[:, None]
    # read again rather than held in registers through the loop
    rows = tl.load(ORDER + head * NQ + index, mask=index < stop, other=0, eviction_policy="evict_first")
    OUT += head * NQ * DV
    store_rows(OUT, rows, cols, acc / total, index < stop, DV)
    if BC < BDV:
        store_rows(OUT, rows, cols + BC, right / total, index < stop, DV)
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
    kv_heads, key_count = keys.shape[1:3]
    out = torch.empty(batch, heads, count, value_dim, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(batch, heads, count, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    width = max(padded(dim), padded(value_dim))
    tall = tiles_for(width, q.dtype, summary is not None)
    low = low_tiles(tall)
    schedule = schedule_tiles(route, tall.rows, tall.keys, low is not None)

    # what the kernel reads of a summary: what is missing is None
    weighted: tuple[Tensor | None, ...] = (None,) * 3
    moved: tuple[Tensor | None, ...] = (None,) * 6  # y, bend, basis, origin, curve, slope
    drift, slots, rank, moves = None, 0, 0, False
    if summary is not None:
        weighted = tuple(x.contiguous() for x in (summary.keys, summary.values, summary.log_weight))
        drift, slots = summary.drift, summary.keys.shape[3]
    if drift is not None:
        rank = drift.basis.shape[-1]
        # A scale that is not above 0 is taken over by q below, and the drift is that of q as it is.
        moves = scale > 0 and finds_drift(width, q.dtype)
        placed = tuple(x.float().contiguous() for x in (drift.basis, drift.origin, drift.curve))
        found = (None, None, *placed) if moves else (*drift_rows(q, drift, route.query), None, None, None)
        moved = (*found, drift.slope.contiguous())
    q, scale = positive_scale(q, scale)

    order, offsets = route.query.order.contiguous(), route.query.offsets.contiguous()
    common = {"D": dim, "DV": value_dim, "BD": padded(dim), "BDV": padded(value_dim), "BR": padded(max(1, rank))}
    wanted = {"SUMMARY": slots > 0, "DRIFT": drift is not None, "MOVES": moves, "PRECISION": precision(q.dtype, width)}
    for tile, ends in ((tall, schedule.tall_ends), (low, schedule.low_ends)):
        if tile is None or ends is None:
            continue
        if low is not None and tile is tall and count <= low.rows:  # no group has rows for a tall tile
            continue
        tiles = schedule.row_tiles(count, low=tile is low)
        tensors = (q, keys, values, out, lse, order, offsets, ends, schedule.key_tiles, schedule.counts)
        counts = (heads, heads // kv_heads, count, key_count, route.cells.shape[2], slots, rank)
        numbers = (*counts, schedule.key_tiles.shape[3], tiles, q.stride(), scale * LOG2_E.value, MAX_BEND)
        blocks = {"BM": tile.rows, "BN": tile.keys, "BC": columns_of(tile, tile is low, padded(value_dim)), "BT": 16}
        place = {"ROWS": tall.rows, "LOW": tile is low, "WIDE": key_count * width >= 1 << 31}
        attend_kernel[(batch * heads * tiles,)](
            *tensors, *weighted, *moved, *numbers, **common, **wanted, **blocks, **place, **tile.options
        )
    return out, lse

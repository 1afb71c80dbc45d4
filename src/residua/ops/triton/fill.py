"""Spends the pair budget of every head: the best cells first, one after the other while they fit.

Cells come in buckets of nearly the same priority. Whole buckets that fit are taken in any order; only in the bucket
where a budget overflows the cells are ranked, by bisection, so no cell is ever sorted. The result is that of a full
ranking, in which the first of two cells of equal priority comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .priority import cell_priority
from .shapes import padded

BLOCK = 1024  # cells that are looked at together
NOTHING = tl.constexpr(-2139095041)  # minus infinity as such an integer


@triton.jit
def look_up(tables, ids, stop, left, past, NORMALISED):
    """Loads the cells ORDER[ids], ids < stop.

    -> the cell index, a sortable integer key of its priority, and its cost in pairs. The cost is 0 if the cell is not a
    candidate: too large for `left`, already kept as the best of its row, or decided earlier, which all cells are up to
    `past`, a key and a cell.
    """
    ORDER, MASS, BASE, BIAS, BEST, QUERY_SIZES, KV_SIZES, CK, row_step = tables
    here = ids < stop
    cell = tl.load(ORDER + ids, mask=here, other=0)
    group = cell // CK
    column = cell % CK
    cost = tl.load(QUERY_SIZES + group) * tl.load(KV_SIZES + column)
    # computed again from a table of rows and one of columns, rather than written and read for every cell
    mass = tl.load(MASS + group.to(tl.int64) * row_step + column)
    priority = cell_priority(mass, tl.load(BASE + group), tl.load(BIAS + column), NORMALISED)
    # the bits of a float as an integer of the same order
    bits = tl.where(priority == 0.0, 0.0, priority).to(tl.int32, bitcast=True)  # there are two zeros
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    decided = (key > past[0]) | ((key == past[0]) & (cell <= past[1]))
    fits = here & (cost <= left) & (tl.load(BEST + group) != column) & (decided == 0)
    return cell, key, tl.where(fits, cost, 0)


@triton.jit
def fill_kernel(
    ORDER,  # [rankings, B, H, CQ * CK] int32: cells, bucket after bucket, in their own order within one
    STARTS,  # [rankings, B, H, buckets + 1] int64: where each bucket begins
    BUCKET,  # [rankings, B, H, CQ, CK] int16
    MASS,  # [B, H, CQ, >= CK] fp32 strided over the last dimension only
    BASE,  # [B, H, CQ] fp32
    BIAS,  # [rankings, B, H, CK] fp32
    BEST,  # [rankings, B, H, CQ] int32
    QUERY_SIZES,  # [B, H, CQ] int64
    KV_SIZES,  # [B, H, >= CK] int64
    BUDGETS,  # [n, B, H] int64
    CELLS,  # [n, B, H, CQ, CK] uint8, written to where a cell is taken
    heads,  # B * H
    CQ,
    CK,
    row_step,  # from one row of MASS to the next
    head_step,  # from one head of KV_SIZES to the next
    buckets,
    passes,
    weighed,  # budgets of the first ranking; the others are spent by the second
    BC: tl.constexpr,
    BQ: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """One program: one budget of one head. Walks the buckets, the best first, BC cells at a time, and marks in CELLS
    those that it takes. Where the budget overflows a pass ends; the next one goes on behind the last cell taken."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    ranked = tl.where(pid // heads < weighed, head, heads + head)
    count = CQ * CK
    ORDER += ranked * count
    STARTS += ranked * (buckets + 1)
    BUCKET += ranked * count
    MASS += head * CQ * row_step
    BASE += head * CQ
    BIAS += ranked * CK
    BEST += ranked * CQ
    QUERY_SIZES += head * CQ
    KV_SIZES += head * head_step
    CELLS += pid * count
    tables = (ORDER, MASS, BASE, BIAS, BEST, QUERY_SIZES, KV_SIZES, CK, row_step)
    left = tl.load(BUDGETS + pid)
    # every query group keeps its best cell, whatever it costs
    for first in range(0, CQ, BQ):
        groups = first + tl.arange(0, BQ)
        rows = tl.load(QUERY_SIZES + groups, mask=groups < CQ, other=0)
        best = tl.load(BEST + groups, mask=groups < CQ, other=0)
        cost = rows * tl.load(KV_SIZES + best, mask=groups < CQ, other=0)
        tl.store(CELLS + groups.to(tl.int64) * CK + best, (cost > 0).to(tl.uint8), mask=(groups < CQ) & (cost > 0))
        left -= tl.sum(cost, 0)
    spent = tl.zeros([], tl.int64)  # in this pass
    before = tl.zeros([], tl.int64)  # of it, before the bucket in which the walk is
    past_key = tl.full([], 2147483647, tl.int32)  # all cells up to this one are decided
    past_cell = tl.full([], -1, tl.int32)
    first = tl.zeros([], tl.int32)
    while (first < count) & (passes > 0) & (left > 0):
        ids = first + tl.arange(0, BC)
        # a cell that does not fit is passed over, so that one huge cell does not end the spending
        past = (past_key, past_cell)
        cell, key, cost = look_up(tables, ids, count, left, past, NORMALISED)
        running = spent + tl.cumsum(cost, 0)
        over = tl.min(tl.where((cost > 0) & (running > left), ids, first + BC), 0)
        # the bucket in which the budget overflows, or the block ends
        last = tl.minimum(tl.minimum(over, first + BC - 1), count - 1)
        bucket = tl.load(BUCKET + tl.load(ORDER + last)).to(tl.int32)
        start = tl.load(STARTS + bucket).to(tl.int32)
        before = tl.where(start >= first, spent + tl.sum(tl.where(ids < start, cost, 0), 0), before)
        if over == first + BC:
            # all of the block fits
            tl.store(CELLS + cell, (cost > 0).to(tl.uint8), mask=cost > 0)
            spent += tl.sum(cost, 0)
            first += BC
        else:
            # what comes before the bucket fits; then a bisection for the lowest key of which all cells fit
            tl.store(CELLS + cell, (cost > 0).to(tl.uint8), mask=(cost > 0) & (ids < start))
            stop = tl.load(STARTS + bucket + 1).to(tl.int32)
            room = left - before
            # nearly all buckets are one block, which stays in registers
            cell, key, cost = look_up(tables, start + tl.arange(0, BC), stop, left, past, NORMALISED)
            lowest = tl.where(cost > 0, key, 2147483647)
            highest = tl.where(cost > 0, key, -2147483648)
            for place in range(start + BC, stop, BC):
                _, other_key, other_cost = look_up(tables, place + tl.arange(0, BC), stop, left, past, NORMALISED)
                lowest = tl.minimum(lowest, tl.where(other_cost > 0, other_key, 2147483647))
                highest = tl.maximum(highest, tl.where(other_cost > 0, other_key, -2147483648))
            low = tl.min(lowest, 0).to(tl.int64)  # cells of this key and above are too many
            high = tl.max(highest, 0).to(tl.int64) + 1  # those fit, and cost `sure`
            sure = tl.zeros([], tl.int64)
            while high - low > 1:
                middle = (low + high) // 2
                sums = tl.where(key >= middle, cost, 0)
                for place in range(start + BC, stop, BC):
                    _, other_key, other_cost = look_up(tables, place + tl.arange(0, BC), stop, left, past, NORMALISED)
                    sums += tl.where(other_key >= middle, other_cost, 0)
                total = tl.sum(sums, 0)
                sure = tl.where(total <= room, total, sure)
                high = tl.where(total <= room, middle, high)
                low = tl.where(total <= room, low, middle)
            tl.debug_barrier()  # cells of this bucket that were taken before are written again
            # cells of key `low` are taken in their own order, until one does not fit
            end = tl.full([], 2147483647, tl.int32)  # the first one that does not
            for place in range(start, stop, BC):
                cell, key, cost = look_up(tables, place + tl.arange(0, BC), stop, left, past, NORMALISED)
                tied = (cost > 0) & (key == low)
                running = sure + tl.cumsum(tl.where(tied, cost, 0), 0)
                end = tl.minimum(end, tl.min(tl.where(tied & (running > room), cell, 2147483647), 0))
                taken = (cost > 0) & ((key > low) | (tied & (cell < end)))
                # a cell without priority may be kept for other reasons, and its order was right before
                tl.store(CELLS + cell, taken.to(tl.uint8), mask=(cost > 0) & (taken | (key > NOTHING)))
                sure += tl.sum(tl.where(tied & (cell < end), cost, 0), 0)
            # a new pass begins behind the last cell that was taken, with what is left
            left = room - sure
            spent = tl.zeros([], tl.int64)
            before = tl.zeros([], tl.int64)
            past_key = low.to(tl.int32)
            past_cell = end - 1
            passes -= 1
            first = start


def fill(
    tables: tuple[Tensor, ...], budgets: Tensor, cells: Tensor, passes: int, weighed: int, normalised: bool
) -> None:
    """tables: the cells ranked by bucket (order [rankings * B * H, Cq * Ck] int32, starts [rankings * B * H, buckets +
    1]), and what `spend.priority_kernel` read and found (bucket, mass, base, bias, best, query_sizes, kv_sizes).
    budgets [n, B, H] int64, the first `weighed` by the first ranking -> cells [n, B, H, Cq, Ck] uint8, 1 where a cell
    is taken. All but mass contiguous."""
    number, batch, heads, cq, ck = cells.shape
    _, starts, _, mass, *_, kv_sizes = tables
    sizes = (batch * heads, cq, ck, mass.stride(2), kv_sizes.shape[-1], starts.shape[-1] - 1, passes, weighed)
    kind = {"BC": BLOCK, "BQ": min(1024, padded(cq)), "NORMALISED": normalised}
    fill_kernel[(number * batch * heads,)](
        *tables, budgets, cells, *sizes, **kind, num_warps=16, enable_fp_fusion=False
    )

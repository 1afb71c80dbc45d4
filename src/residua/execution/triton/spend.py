"""The pair budget of every head: cells ranked once, then taken one after the other while they fit.

`Backend.spend` says what is taken. One program walks the ranked cells of one head for one budget; it stops
when the budget has overflown as often as the plain version looks again.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import padded

BLOCK = 1024  # ranked cells that are looked at together


@triton.jit
def worth_kernel(
    MASS,  # [B, H, CQ, CK] fp32 strided over the last dimension only: log of the mass, or of its share
    QUERY_SIZES,  # [B, H, CQ] int64
    KV_SIZES,  # [B, H, >= CK] int64
    WORTH,  # [B, H, CQ, free] fp32: share per pair
    BEST,  # [B, H, CQ] int32: the best cell of every query group
    CELLS,  # [n, B, H, CQ, free] uint8: what is kept whatever it costs
    CQ,
    CK,
    free,
    sr,  # step from one row of MASS to the next
    ss,  # step from one head of KV_SIZES to the next
    number,
    step,  # from one budget of CELLS to the next
    BC: tl.constexpr,
    SHARES: tl.constexpr,  # whether MASS holds shares; otherwise groups of NaN are kept, and count as nothing
):
    row = tl.program_id(0).to(tl.int64)
    head = row // CQ
    rows = tl.load(QUERY_SIZES + row)
    base = tl.zeros([], tl.float32)
    if not SHARES:
        top = tl.full([BC], -float("inf"), tl.float32)
        total = tl.zeros([BC], tl.float32)
        for first in range(0, CK, BC):
            ids = first + tl.arange(0, BC)
            mass = tl.load(MASS + row * sr + ids, mask=ids < CK, other=-float("inf"))
            mass = tl.where(mass == mass, mass, -float("inf"))
            new_top = tl.maximum(top, mass)
            safe = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp(top - safe) + tl.exp(mass - safe)
            top = new_top
        peak = tl.max(top, 0)
        safe = tl.where(peak == -float("inf"), 0.0, peak)
        base = safe + tl.log(tl.sum(total * tl.exp(top - safe), 0))
    best = tl.full([BC], -float("inf"), tl.float32)
    place = tl.zeros([BC], tl.int32)
    for first in range(0, free, BC):
        ids = first + tl.arange(0, BC)
        here = ids < free
        keys = tl.load(KV_SIZES + head * ss + ids, mask=here, other=0)
        mass = tl.load(MASS + row * sr + ids, mask=here, other=-float("inf"))
        occupied = (keys > 0) & (rows > 0)
        if not SHARES:
            always = (occupied & (mass != mass)).to(tl.uint8)
            for n in range(0, number):
                tl.store(CELLS + n * step + row * free + ids, always, mask=here)
            mass = tl.where(mass == mass, mass, -float("inf"))
        worth = mass - base - tl.log(tl.maximum(keys, 1).to(tl.float32))
        worth = tl.where(worth == worth, worth, float("inf"))  # NaN comes first: it must reach the output
        worth = tl.where(occupied, worth, -float("inf"))
        tl.store(WORTH + row * free + ids, worth, mask=here)
        better = worth > best
        best = tl.where(better, worth, best)
        place = tl.where(better, ids, place)
    top_worth = tl.max(best, 0)
    first_best = tl.min(tl.where(best == top_worth, place, free), 0)
    tl.store(BEST + row, tl.where(top_worth == -float("inf"), 0, first_best))


@triton.jit
def missed_kernel(
    MASS,  # [B, H, CQ, CK] fp32
    CELLS,  # [n, B, H, CQ, CK] uint8
    OUT,  # [n, B, H, CQ] fp32
    CK,
    rows,  # B * H * CQ
    number,
    BC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BC)
    mass = tl.load(MASS + row * CK + ids, mask=ids < CK, other=-float("inf"))
    mass = tl.where(mass == mass, mass, -float("inf"))
    top = tl.max(mass, 0)
    weight = tl.exp(mass - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    total = tl.where(total > 0.0, total, 1.0)  # a row without any mass misses none
    for n in range(0, number):
        at = (n * rows + row) * CK + ids
        kept = tl.load(CELLS + at, mask=ids < CK, other=1) != 0
        tl.store(OUT + n * rows + row, tl.sum(tl.where(kept, 0.0, weight), 0) / total)


@triton.jit
def fill_kernel(
    ORDER,  # [B, H, CQ * CK] int64: cells, best first
    BEST,  # [B, H, CQ] int32
    QUERY_SIZES,  # [B, H, CQ] int64
    KV_SIZES,  # [B, H, >= CK] int64
    BUDGETS,  # [n, B, H] int64
    CELLS,  # [n, B, H, CQ, CK] uint8, written to where a cell is taken
    heads,  # B * H
    CQ,
    CK,
    ss,  # step from one head of KV_SIZES to the next
    passes,
    BC: tl.constexpr,
    BQ: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    count = CQ * CK
    ORDER += head * count
    BEST += head * CQ
    QUERY_SIZES += head * CQ
    KV_SIZES += head * ss
    CELLS += pid * count
    left = tl.load(BUDGETS + pid)
    for first in range(0, CQ, BQ):
        groups = first + tl.arange(0, BQ)
        rows = tl.load(QUERY_SIZES + groups, mask=groups < CQ, other=0)
        best = tl.load(BEST + groups, mask=groups < CQ, other=0)
        cost = rows * tl.load(KV_SIZES + best, mask=groups < CQ, other=0)
        tl.store(
            CELLS + groups.to(tl.int64) * CK + best, (cost > 0).to(tl.uint8), mask=(groups < CQ) & (cost > 0)
        )
        left -= tl.sum(cost, 0)
    spent = tl.zeros([], tl.int64)  # in this pass
    first = tl.zeros([], tl.int32)
    while (first < count) & (passes > 0):
        ids = first + tl.arange(0, BC)
        cell = tl.load(ORDER + ids, mask=ids < count, other=0)
        group = cell // CK
        column = cell % CK
        cost = tl.load(QUERY_SIZES + group) * tl.load(KV_SIZES + column)
        free = (ids < count) & (cost > 0) & (tl.load(BEST + group) != column)
        # a cell that does not fit is passed over, so that one huge cell does not end the spending
        fits = free & (cost <= left)
        running = spent + tl.cumsum(tl.where(fits, cost, 0), 0)
        over = fits & (running > left)
        stop = tl.min(tl.where(over, ids, first + BC), 0)
        taken = fits & (ids < stop)
        tl.store(CELLS + cell, taken.to(tl.uint8), mask=taken)
        spent += tl.sum(tl.where(taken, cost, 0), 0)
        # where the budget overflows a new pass begins, with what is left
        overflow = stop < first + BC
        left = tl.where(overflow, left - spent, left)
        spent = tl.where(overflow, 0, spent)
        passes -= overflow.to(tl.int32)
        first = stop


def spend(
    log_mass: Tensor,
    query_sizes: Tensor,
    kv_sizes: Tensor,
    budgets: Tensor,
    passes: int,
    free: int,
    shares: bool,
) -> Tensor:
    """log_mass [B, H, Cq, Ck], or its shares, sizes [B, H, .] int64, budgets [n, B, H] int64
    -> [n, B, H, Cq, free] bool"""
    batch, heads, cq, ck = log_mass.shape
    number, device = budgets.shape[0], log_mass.device
    make = torch.zeros if shares else torch.empty  # otherwise the first kernel writes what is always kept
    cells = make(number, batch, heads, cq, free, dtype=torch.uint8, device=device)
    if cells.numel() == 0:
        return cells.bool()
    mass = log_mass if _steady(log_mass) else log_mass.contiguous()
    query_sizes, kv_sizes = query_sizes.contiguous(), kv_sizes.contiguous()
    worth = torch.empty(batch, heads, cq, free, dtype=torch.float32, device=device)
    best = torch.empty(batch, heads, cq, dtype=torch.int32, device=device)
    worth_kernel[(batch * heads * cq,)](
        mass, query_sizes, kv_sizes, worth, best, cells, cq, ck, free, mass.stride(2), kv_sizes.shape[-1],
        number, batch * heads * cq * free, BC=min(1024, padded(ck)), SHARES=shares, num_warps=4,
    )  # fmt: skip
    order = worth.flatten(2).sort(dim=-1, descending=True, stable=True).indices
    fill_kernel[(number * batch * heads,)](
        order,
        best,
        query_sizes,
        kv_sizes,
        budgets.contiguous(),
        cells,
        batch * heads,
        cq,
        free,
        kv_sizes.shape[-1],
        passes,
        BC=BLOCK,
        BQ=min(1024, padded(cq)),
        num_warps=8,
    )
    return cells.view(torch.bool)


def missed_mass(log_mass: Tensor, cells: Tensor) -> Tensor:
    """log_mass [B, H, Cq, Ck], cells [n, B, H, Cq, Ck] bool -> [n, B, H, Cq] fp32"""
    number, *shape = cells.shape
    out = torch.empty(cells.shape[:-1], dtype=torch.float32, device=cells.device)
    if out.numel():
        missed_kernel[(out[0].numel(),)](
            log_mass.contiguous(), cells.contiguous().view(torch.uint8), out, shape[-1], out[0].numel(),
            number, BC=padded(shape[-1]), num_warps=4,
        )  # fmt: skip
    return out


def _steady(x: Tensor) -> bool:
    """Whether every row lies one fixed step behind the one before, its values side by side."""
    _, heads, groups, _ = x.shape
    step = x.stride(2)
    whole = x.stride(1) == step * groups and (x.shape[0] == 1 or x.stride(0) == step * groups * heads)
    return x.stride(3) == 1 and whole

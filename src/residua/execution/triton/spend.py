"""The pair budget of every head: cells ranked once, then taken one after the other while they fit.

`residua.routing` says what is taken. One program walks the ranked cells of one head for one budget; it stops
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
    SHARE,  # [B, H, CQ, CK] fp32 strided over the last dimension only: log of the share of a row's mass
    QUERY_SIZES,  # [B, H, CQ] int64
    KV_SIZES,  # [B, H, CK] int64
    WORTH,  # [B, H, CQ, CK] fp32: share per pair
    BEST,  # [B, H, CQ] int32: the best cell of every query group
    CQ,
    CK,
    sr,  # step from one row of SHARE to the next
    BC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row // CQ
    rows = tl.load(QUERY_SIZES + row)
    best = tl.full([BC], -float("inf"), tl.float32)
    place = tl.zeros([BC], tl.int32)
    for first in range(0, CK, BC):
        ids = first + tl.arange(0, BC)
        here = ids < CK
        keys = tl.load(KV_SIZES + head * CK + ids, mask=here, other=0)
        worth = tl.load(SHARE + row * sr + ids, mask=here, other=-float("inf"))
        worth = worth - tl.log(tl.maximum(keys, 1).to(tl.float32))
        worth = tl.where(worth == worth, worth, float("inf"))  # NaN comes first: it must reach the output
        worth = tl.where((keys > 0) & (rows > 0), worth, -float("inf"))
        tl.store(WORTH + row * CK + ids, worth, mask=here)
        better = worth > best
        best = tl.where(better, worth, best)
        place = tl.where(better, ids, place)
    top = tl.max(best, 0)
    first_best = tl.min(tl.where(best == top, place, CK), 0)
    tl.store(BEST + row, tl.where(top == -float("inf"), 0, first_best))


@triton.jit
def fill_kernel(
    ORDER,  # [B, H, CQ * CK] int64: cells, best first
    BEST,  # [B, H, CQ] int32
    QUERY_SIZES,  # [B, H, CQ] int64
    KV_SIZES,  # [B, H, CK] int64
    BUDGETS,  # [n, B, H] int64
    CELLS,  # [n, B, H, CQ, CK] uint8, zeros
    heads,  # B * H
    CQ,
    CK,
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
    KV_SIZES += head * CK
    CELLS += pid * count
    left = tl.load(BUDGETS + pid)
    for first in range(0, CQ, BQ):
        groups = first + tl.arange(0, BQ)
        rows = tl.load(QUERY_SIZES + groups, mask=groups < CQ, other=0)
        best = tl.load(BEST + groups, mask=groups < CQ, other=0)
        cost = rows * tl.load(KV_SIZES + best, mask=groups < CQ, other=0)
        tl.store(CELLS + groups.to(tl.int64) * CK + best, (cost > 0).to(tl.uint8), mask=groups < CQ)
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


def spend(log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Tensor, passes: int) -> Tensor:
    """log_share [B, H, Cq, Ck], sizes [B, H, .] int64, budgets [n, B, H] int64 -> [n, B, H, Cq, Ck] bool"""
    batch, heads, cq, ck = log_share.shape
    number, device = budgets.shape[0], log_share.device
    cells = torch.zeros(number, batch, heads, cq, ck, dtype=torch.uint8, device=device)
    if cells.numel() == 0:
        return cells.bool()
    share = log_share if _steady(log_share) else log_share.contiguous()
    query_sizes, kv_sizes = query_sizes.contiguous(), kv_sizes.contiguous()
    worth = torch.empty(batch, heads, cq, ck, dtype=torch.float32, device=device)
    best = torch.empty(batch, heads, cq, dtype=torch.int32, device=device)
    worth_kernel[(batch * heads * cq,)](
        share, query_sizes, kv_sizes, worth, best, cq, ck, share.stride(2), BC=min(1024, padded(ck)),
        num_warps=4,
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
        ck,
        passes,
        BC=BLOCK,
        BQ=min(1024, padded(cq)),
        num_warps=8,
    )
    return cells.view(torch.bool)


def _steady(x: Tensor) -> bool:
    """Whether every row lies one fixed step behind the one before, its values side by side."""
    _, heads, groups, _ = x.shape
    step = x.stride(2)
    whole = x.stride(1) == step * groups and (x.shape[0] == 1 or x.stride(0) == step * groups * heads)
    return x.stride(3) == 1 and whole

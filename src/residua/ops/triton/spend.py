"""The pair budget of every head: the priority of cells, the buckets of nearly equal priority that they fall into, and
the mass that is left out. `fill.py` then takes the cells."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import FILL_PASSES
from .choose_slots import MAX_GROUPS
from .fill import fill
from .priority import cell_priority
from .shapes import as_bytes, padded
from .sort import sort_labels

# Buckets of cells of nearly the same priority, the best first. Priority is the log of a share of mass per key; around
# that of a head whose mass is even, where budgets often end, buckets are narrow.
BUCKETS = tl.constexpr(1023)
NARROW, WIDE = tl.constexpr(256.0), tl.constexpr(16.0)  # per unit of the logarithm
BEFORE, BEHIND = tl.constexpr(256), tl.constexpr(768)  # the narrow buckets lie between these
STRETCH, BLOCK = 4096, 32  # cells that one program sorts into buckets, and compares with each other


@triton.jit
def bucket_of(priority, level):
    """The bucket of a priority: the higher the priority, the lower the bucket. Narrow within 1 of `level`."""
    x = level - priority
    near = BEFORE + (x + 1.0) * NARROW
    far = tl.where(x < 0.0, BEFORE + (x + 1.0) * WIDE, BEHIND + (x - 1.0) * WIDE)
    place = tl.floor(tl.where(tl.abs(x) < 1.0, near, far))
    return tl.minimum(tl.maximum(place, 0.0), BUCKETS - 1.0).to(tl.int32)


@triton.jit
def priority_kernel(
    MASS,  # [B, H, CQ, CK] fp32 strided over the last dimension only: log of the mass, or of its share
    QUERY_SIZES,  # [B, H, CQ] int64
    KV_SIZES,  # [B, H, >= CK] int64
    PRIORITY,  # [B, H, >= CK] fp32, or None: log of what a unit of mass counts, for the first ranking
    BASE,  # [B, H, CQ] fp32: log of the mass of a row
    BIAS,  # [rankings, B, H, free] fp32: log of what a share of the row's mass counts, per key
    BUCKET,  # [rankings, B, H, CQ, free] int16
    BEST,  # [rankings, B, H, CQ] int32: the best cell of every query group
    CELLS,  # [n, B, H, CQ, free] uint8: what is kept whatever it costs
    CQ,
    CK,
    free,
    row_step,  # from one row of MASS to the next
    head_step,  # from one head of KV_SIZES and PRIORITY to the next
    rows_of_all,  # B * H * CQ
    number,
    budget_step,  # from one budget of CELLS to the next
    BC: tl.constexpr,
    NORMALISED: tl.constexpr,  # whether MASS holds shares; otherwise groups of NaN are kept, and count as nothing
    RANKINGS: tl.constexpr,  # the last one is by mass alone, if there are two
):
    """One program: the cells of one query group. Writes what `fill_kernel` needs to rank them (BASE, BIAS), their
    BUCKETs, the BEST cell, and into CELLS those that are kept whatever they cost."""
    row = tl.program_id(0).to(tl.int64)
    head = row // CQ
    rows = tl.load(QUERY_SIZES + row)
    base = tl.zeros([], tl.float32)
    if not NORMALISED:
        # the log of the row's mass: an online log-sum-exp in every lane, then over the lanes
        top = tl.full([BC], -float("inf"), tl.float32)
        total = tl.zeros([BC], tl.float32)
        for first in range(0, CK, BC):
            ids = first + tl.arange(0, BC)
            mass = tl.load(MASS + row * row_step + ids, mask=ids < CK, other=-float("inf"))
            mass = tl.where(mass == mass, mass, -float("inf"))
            new_top = tl.maximum(top, mass)
            safe = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp(top - safe) + tl.exp(mass - safe)
            top = new_top
        peak = tl.max(top, 0)
        safe = tl.where(peak == -float("inf"), 0.0, peak)
        base = safe + tl.log(tl.sum(total * tl.exp(top - safe), 0))
    tl.store(BASE + row, base)
    all_keys = tl.zeros([], tl.int64)
    for first in range(0, free, BC):
        ids = first + tl.arange(0, BC)
        all_keys += tl.sum(tl.load(KV_SIZES + head * head_step + ids, mask=ids < free, other=0), 0)
    # the priority of an even share of the mass per key
    level = -tl.log(tl.maximum(all_keys, 1).to(tl.float32))
    for ranking in tl.static_range(RANKINGS):
        best = tl.full([BC], -float("inf"), tl.float32)
        place = tl.zeros([BC], tl.int32)
        for first in range(0, free, BC):
            ids = first + tl.arange(0, BC)
            here = ids < free
            keys = tl.load(KV_SIZES + head * head_step + ids, mask=here, other=0)
            mass = tl.load(MASS + row * row_step + ids, mask=here, other=-float("inf"))
            occupied = (keys > 0) & (rows > 0)
            if not NORMALISED and ranking == 0:
                always = (occupied & (mass != mass)).to(tl.uint8)
                for n in range(0, number):
                    tl.store(CELLS + n * budget_step + row * free + ids, always, mask=here)
            bias = -tl.log(tl.maximum(keys, 1).to(tl.float32))
            if PRIORITY is not None and ranking == 0:
                bias += tl.load(PRIORITY + head * head_step + ids, mask=here, other=0.0)
            # one row of every head writes what all of them find
            tl.store(BIAS + head * free + ids, bias, mask=here & (row % CQ == 0))
            # the bucket of every cell, and the best cell so far in every lane
            priority = tl.where(occupied, cell_priority(mass, base, bias, NORMALISED), -float("inf"))
            tl.store(BUCKET + row * free + ids, bucket_of(priority, level).to(tl.int16), mask=here)
            better = priority > best
            best = tl.where(better, priority, best)
            place = tl.where(better, ids, place)
        top_priority = tl.max(best, 0)
        first_best = tl.min(tl.where(best == top_priority, place, free), 0)
        tl.store(BEST + row, tl.where(top_priority == -float("inf"), 0, first_best))
        BIAS += rows_of_all // CQ * free
        BUCKET += rows_of_all * free
        BEST += rows_of_all


@triton.jit
def missed_kernel(MASS, CELLS, OUT, CK, rows, number, BC: tl.constexpr):
    """One program: one query group. OUT [n, B, H, CQ] = the share of its MASS [B, H, CQ, CK] in groups that it does not
    keep, for each of the n CELLS [n, B, H, CQ, CK] uint8. `rows` = B * H * CQ."""
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


def best_cells(
    log_mass: Tensor,
    query_sizes: Tensor,
    kv_sizes: Tensor,
    budgets: Sequence[Tensor],
    free: int | None = None,
    priority: Tensor | None = None,
    weighed: int | None = None,
    shares: bool = False,
) -> Tensor:
    """log_mass [B, H, Cq, Ck], or its shares, sizes [B, H, .] int64, n budgets [B, H] int64, and for the
    first `weighed` of them priority [B, H, Ck] -> [n, B, H, Cq, free] bool"""
    batch, heads, cq, ck = log_mass.shape
    number, device, free = len(budgets), log_mass.device, ck if free is None else free
    make = torch.zeros if shares else torch.empty  # otherwise the first kernel writes what is always kept
    cells = make(number, batch, heads, cq, free, dtype=torch.uint8, device=device)
    if cells.numel() == 0:
        return cells.bool()
    weighed = number if priority is None or weighed is None else weighed
    rankings = 1 if weighed == number else 2
    mass = log_mass if _steady(log_mass) else log_mass.contiguous()
    query_sizes, kv_sizes = query_sizes.contiguous(), kv_sizes.contiguous()
    base = torch.empty(batch, heads, cq, dtype=torch.float32, device=device)
    bias = torch.empty(rankings, batch, heads, free, dtype=torch.float32, device=device)
    bucket = torch.empty(rankings, batch, heads, cq, free, dtype=torch.int16, device=device)
    best = torch.empty(rankings, batch, heads, cq, dtype=torch.int32, device=device)
    priority = None if priority is None else priority.contiguous()
    tensors = (mass, query_sizes, kv_sizes, priority, base, bias, bucket, best, cells)
    sizes = (cq, ck, free, mass.stride(2), kv_sizes.shape[-1])
    counts = (batch * heads * cq, number, batch * heads * cq * free)
    kind = {"BC": min(1024, padded(ck)), "NORMALISED": shares, "RANKINGS": rankings}
    priority_kernel[(batch * heads * cq,)](*tensors, *sizes, *counts, **kind, num_warps=8, enable_fp_fusion=False)
    order, starts = sort_labels(bucket.view(rankings * batch * heads, -1), BUCKETS.value, STRETCH, torch.int32, BLOCK)
    tables = (order, starts, bucket, mass, base, bias, best, query_sizes, kv_sizes)
    fill(tables, torch.stack(list(budgets)), cells, FILL_PASSES, weighed, shares)
    return cells.view(torch.bool)


def missed_mass(log_mass: Tensor, cells: Tensor) -> Tensor | None:
    """log_mass [B, H, Cq, Ck], cells [n, B, H, Cq, Ck] bool -> [n, B, H, Cq] fp32"""
    number, *shape = cells.shape
    if shape[-1] > MAX_GROUPS:
        return None
    out = torch.empty(cells.shape[:-1], dtype=torch.float32, device=cells.device)
    if out.numel():
        tensors = (log_mass.contiguous(), as_bytes(cells), out)
        rows = out[0].numel()
        missed_kernel[(rows,)](*tensors, shape[-1], rows, number, BC=padded(shape[-1]))
    return out


def _steady(x: Tensor) -> bool:
    """Whether every row lies one fixed step behind the one before, its values side by side."""
    _, heads, groups, _ = x.shape
    step = x.stride(2)
    whole = x.stride(1) == step * groups and (x.shape[0] == 1 or x.stride(0) == step * groups * heads)
    return x.stride(3) == 1 and whole

"""Which skipped K/V groups of a query group share a slot, and what slots weigh: one program per query group.

Sums go over the groups in their order, so repeats are bit-identical; `residua.method.summary.expansion` says what
the results mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .device_functions import kv_head_of
from .shapes import as_bytes, padded

MAX_GROUPS = 4096  # that one program holds in its registers
COLUMNS = 64  # K/V groups that are compared with all neighbourhoods at a time


@triton.jit
def heaviest(mass, skipped, ids, single):
    """The `single` heaviest of the skipped groups, the first ones among ties."""
    bits = mass.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    key = tl.where(skipped, key, -2147483648).to(tl.int64)
    low = tl.full([], -2147483648, tl.int64)  # at least `single` keys are no less
    high = tl.full([], 2147483648, tl.int64)  # fewer are
    while high - low > 1:
        middle = (low + high) // 2
        enough = tl.sum((key >= middle).to(tl.int32), 0) >= single
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    tie = (key == low).to(tl.int32)
    left = single - tl.sum((key > low).to(tl.int32), 0)
    return skipped & ((key > low) | ((tie > 0) & (tl.cumsum(tie, 0) <= left)))


@triton.jit
def choose_slots_kernel(
    MASS,  # [B, H, CQ, CK] fp32
    CELLS,  # [B, H, CQ, CK] uint8: kept
    QUERY_OFFSETS,  # [B, H, CQ + 1] int64
    KV_OFFSETS,  # [B, Hkv, CK + 1] int64
    NEAR,  # [B, Hkv, CK] int64
    WANTED,  # [B, H] uint8
    INDEX,  # [B, H, CQ, CK] int32
    AGAIN,  # the same tensor
    SLOT_MASS,  # [B, H, CQ, single + merged] fp32
    SHARE,  # [B, H, CQ, CK] fp32
    H,
    heads_per_kv,
    CQ,
    CK,
    single,
    merged,
    BC: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One program: the K/V groups that one query group skips. INDEX = the slot of each, SLOT_MASS = the log of the mass
    of each slot, SHARE = the share of each group in all that is skipped."""
    row = tl.program_id(0).to(tl.int64)
    head = row // CQ
    kv_head = kv_head_of(head, H, heads_per_kv)
    ids = tl.arange(0, BC)
    here = ids < CK
    at_kv = kv_head * (CK + 1) + ids
    filled = tl.load(KV_OFFSETS + at_kv + 1, mask=here, other=0) > tl.load(KV_OFFSETS + at_kv, mask=here, other=0)
    at_query = QUERY_OFFSETS + row + head  # a row of offsets has CQ + 1 entries
    wanted = (tl.load(WANTED + head) != 0) & (tl.load(at_query + 1) > tl.load(at_query))
    skipped = filled & (tl.load(CELLS + row * CK + ids, mask=here, other=1) == 0) & wanted
    mass = tl.load(MASS + row * CK + ids, mask=here, other=0.0)
    mass = tl.where(skipped, mass, -float("inf"))

    # each group's share of the skipped mass
    top = tl.max(mass, 0)
    weight = tl.exp(mass - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    share = weight / tl.where(total == 0.0, 1.0, total)  # weights of groups that are not skipped are 0
    tl.store(SHARE + row * CK + ids, share, mask=here)

    # the heaviest groups have slots of their own, the others that of their neighbourhood
    alone = heaviest(mass, skipped, ids, single)
    number = tl.cumsum(alone.to(tl.int32), 0) - 1
    near = tl.load(NEAR + kv_head * CK + ids, mask=here, other=0).to(tl.int32)
    slot = tl.where(skipped, tl.where(alone, number, single + near), -1)
    tl.store(INDEX + row * CK + ids, slot, mask=here)
    SLOT_MASS += row * (single + merged)
    tl.store(SLOT_MASS + number, mass, mask=alone)
    slots = tl.arange(0, BS)
    unused = (slots >= tl.sum(alone.to(tl.int32), 0)) & (slots < single)
    tl.store(SLOT_MASS + slots, tl.full([BS], -float("inf"), tl.float32), mask=unused)
    tl.debug_barrier()  # the slots are read by other threads than wrote them

    # the log of the mass of every neighbourhood: the maximum first, then the sum relative to it
    hoods = tl.arange(0, BM)
    peak = tl.full([BM], -float("inf"), tl.float32)
    for first in range(0, CK, BN):
        cols = first + tl.arange(0, BN)
        at = row * CK + cols
        mine = tl.load(AGAIN + at, mask=cols < CK, other=-1)[None, :] == (single + hoods)[:, None]
        part = tl.load(MASS + at, mask=cols < CK, other=0.0)
        peak = tl.maximum(peak, tl.max(tl.where(mine, part[None, :], -float("inf")), 1))
    base = tl.where(peak == -float("inf"), 0.0, peak)
    sums = tl.zeros([BM], tl.float32)
    for first in range(0, CK, BN):
        cols = first + tl.arange(0, BN)
        at = row * CK + cols
        mine = tl.load(AGAIN + at, mask=cols < CK, other=-1)[None, :] == (single + hoods)[:, None]
        part = tl.load(MASS + at, mask=cols < CK, other=0.0)
        sums += tl.sum(tl.where(mine, tl.exp(part[None, :] - base[:, None]), 0.0), 1)
    tl.store(SLOT_MASS + single + hoods, tl.log(sums) + base, mask=hoods < merged)


def choose_slots(
    log_mass: Tensor,
    cells: Tensor,
    query: Partition,
    kv: Partition,
    near: Tensor,
    single: int,
    merged: int,
    wanted: Tensor,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """log_mass and cells [B, H, Cq, Ck], near [B, Hkv, Ck], wanted [B, H] bool -> slots [B, H, Cq, Ck] int32,
    their masses [B, H, Cq, single + merged] and shares [B, H, Cq, Ck] fp32"""
    batch, heads, cq, ck = log_mass.shape
    if ck > MAX_GROUPS:
        return None
    index = torch.empty(log_mass.shape, dtype=torch.int32, device=log_mass.device)
    mass = torch.empty(batch, heads, cq, single + merged, dtype=torch.float32, device=log_mass.device)
    share = torch.empty(log_mass.shape, dtype=torch.float32, device=log_mass.device)
    if not index.numel():
        return index, mass.fill_(-torch.inf), share
    given = (as_bytes(cells), query.offsets.contiguous(), kv.offsets.contiguous(), near.contiguous(), as_bytes(wanted))
    tensors = (log_mass.float().contiguous(), *given, index, index, mass, share)
    sizes = (heads, heads // kv.offsets.shape[1], cq, ck, single, merged)
    blocks = {"BC": padded(ck), "BS": padded(max(1, single)), "BM": padded(max(1, merged))}
    choose_slots_kernel[(batch * heads * cq,)](*tensors, *sizes, **blocks, BN=min(COLUMNS, padded(ck)))
    return index, mass, share

"""Softmax-weighted mean keys and values of the K/V groups that share a slot, at every anchor.

A program owns a tile of anchors, and with it all of their slots: it walks the K/V groups in order and adds
each to the slot rows that the anchors name, in global memory. No two programs write the same row, so repeats
are bit-identical without atomics. Keys and values are summed by two launches: both sums at once would not
fit in the registers.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .shapes import Tiles, cdiv, padded


@triton.jit
def add_product(a, b, acc):
    """acc + a @ b for an fp32 `a`, with fp32's accuracy: three parts of 16 bits hold all of its digits, at
    half the price of three TF32 products and without a cast of b."""
    if b.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        for _ in tl.static_range(3):
            part = a.to(b.dtype)
            acc = tl.dot(part, b, acc)
            a -= part.to(tl.float32)
    return acc


@triton.jit
def slots_kernel(
    ANCHORS,  # [B, H, CQ, D] fp32
    K,  # [B, Hkv, NK, D] strided
    X,  # [B, Hkv, NK, DX] strided, what is summed: keys or values
    ORDER,  # [B, Hkv, NK] int64
    OFFSETS,  # [B, Hkv, CK + 1] int64
    SLOTS,  # [B, H, CQ, CK] int32
    MASS,  # [B, H, CQ, T] fp32
    SUMS,  # [B, H, CQ, T, DX] fp32, zeros
    H,
    shares,
    CQ,
    CK,
    NK,
    T,
    kb,
    kh,
    kn,
    kd,
    xb,
    xh,
    xn,
    xd,
    tiles,
    scale,  # times log2(e)
    D: tl.constexpr,
    DX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BDX: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    anchors = pid % tiles * BM + tl.arange(0, BM)
    row = head * CQ + anchors
    cols = tl.arange(0, BDX)
    kv_head = head // H * (H // shares) + head % H // shares
    K += head // H * kb + head % H // shares * kh
    X += head // H * xb + head % H // shares * xh
    ORDER += kv_head * NK
    OFFSETS += kv_head * (CK + 1)
    for group in tl.range(0, CK, num_stages=1):
        slot = tl.load(SLOTS + row * CK + group, mask=anchors < CQ, other=-1)
        start = tl.load(OFFSETS + group).to(tl.int32)
        stop = tl.load(OFFSETS + group + 1).to(tl.int32)
        if (stop > start) & (tl.max(slot, 0) >= 0):
            here = row * T + slot
            mask = (slot >= 0)[:, None] & (cols < DX)[None, :]
            # weights and sums are counted in units of 2^-12: the last part of a small weight stays above
            # what 16 bits can hold
            mass = tl.load(MASS + here, mask=slot >= 0, other=0.0) * 1.4426950408889634 - 12
            sums = tl.load(SUMS + here[:, None] * DX + cols[None, :], mask=mask, other=0.0) * 4096
            for first in range(start, stop, BN):
                index = first + tl.arange(0, BN)
                live = index < stop
                rows = tl.load(ORDER + index, mask=live, other=0)
                x_mask = live[:, None] & (cols < DX)[None, :]
                x = tl.load(X + rows[:, None] * xn + cols[None, :] * xd, mask=x_mask, other=0.0)
                scores = tl.zeros([BM, BN], tl.float32)
                for column in tl.static_range(0, BD, BK):
                    dims = column + tl.arange(0, BK)
                    a_mask = (anchors < CQ)[:, None] & (dims < D)[None, :]
                    a = tl.load(ANCHORS + row[:, None] * D + dims[None, :], mask=a_mask, other=0.0)
                    k_mask = live[None, :] & (dims < D)[:, None]
                    k = tl.load(K + rows[None, :] * kn + dims[:, None] * kd, mask=k_mask, other=0.0)
                    scores = add_product(a, k, scores)
                p = tl.where(live[None, :], tl.exp2(scores * scale - mass[:, None]), 0.0)
                sums = add_product(p, x, sums)
            # an anchor without a slot here has added up something, and stores nothing. The slots are read
            # again rather than held in registers, with all of their addresses, through the loop
            slot = tl.load(
                SLOTS + row * CK + group, mask=anchors < CQ, other=-1, eviction_policy="evict_last"
            )
            mask = (slot >= 0)[:, None] & (cols < DX)[None, :]
            tl.store(SUMS + (row * T + slot)[:, None] * DX + cols[None, :], sums / 4096, mask=mask)
            tl.debug_barrier()  # the next group may read these rows with other threads


def tiles_for(width: int, dtype: torch.dtype) -> Tiles:
    """Tile sizes that pass the compile gate."""
    if dtype == torch.float32:
        return Tiles(16, 16, 8, 2 if width <= 128 else 1)
    return Tiles(64 if width <= 64 else 32 if width <= 128 else 16, 32, 8, 2)


def slot_means(
    anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """anchors [B, H, Cq, D], k/v [B, Hkv, Nk, .], slots [B, H, Cq, Ck] int32, log_mass [B, H, Cq, T]
    -> keys [B, H, Cq, T, D], values [B, H, Cq, T, Dv], both fp32"""
    anchors, log_mass = anchors.float().contiguous(), log_mass.float().contiguous()
    slots = slots.int().contiguous()
    keys = _slot_sums(anchors, k, k, kv, slots, log_mass, scale)
    return keys, _slot_sums(anchors, k, v, kv, slots, log_mass, scale)


def _slot_sums(
    anchors: Tensor, k: Tensor, x: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor, scale: float
) -> Tensor:
    """The weighted sums of x [B, Hkv, Nk, Dx] -> [B, H, Cq, T, Dx] fp32"""
    batch, heads, cq, dim = anchors.shape
    kv_heads, count, sum_dim = k.shape[1], k.shape[2], x.shape[-1]
    sums = torch.zeros(*log_mass.shape, sum_dim, dtype=torch.float32, device=k.device)
    if sums.numel() == 0 or slots.numel() == 0:
        return sums
    width = max(padded(dim), padded(sum_dim))
    size = tiles_for(width, k.dtype)
    tiles = cdiv(cq, size.rows)
    slots_kernel[(batch * heads * tiles,)](
        anchors,
        k,
        x,
        kv.order.contiguous(),
        kv.offsets.contiguous(),
        slots,
        log_mass,
        sums,
        heads,
        heads // kv_heads,
        cq,
        kv.groups,
        count,
        log_mass.shape[-1],
        *k.stride(),
        *x.stride(),
        tiles,
        scale * math.log2(math.e),
        D=dim,
        DX=sum_dim,
        BM=size.rows,
        BN=size.keys,
        BD=padded(dim),
        BK=min(padded(dim), 32 if k.dtype == torch.float32 and width > 128 else 64),
        BDX=padded(sum_dim),
        num_warps=size.warps,
        num_stages=size.stages,
    )
    return sums

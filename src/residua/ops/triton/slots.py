"""Softmax-weighted mean keys and values of the K/V groups that share a slot, at every anchor.

A slot below `single` belongs to one K/V group; the others to one neighbourhood of groups each. A program owns a tile of
anchors and some neighbourhoods, and walks the groups of one neighbourhood after the other: what a group adds to the
shared slot stays in registers until the neighbourhood is done, what it adds to a slot of its own is stored at once. No
two programs write the same row, so repeats are bit-identical without atomics, and nothing is read back.

Weights are rounded to 16 bits and divided by the sum of what they were rounded to, so a mean is off by no
more than the rounding of its members' deviations. The log-weight of a slot belongs to the key as it is
stored: rounded keys are exact at their anchor all the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import LN_2, LOG2_E, add_product, kv_head_of, load_matrix
from .shapes import Tiles, cdiv, padded

# weights are counted in units of 2^-DIGITS: small ones stay above what 16 bits can hold
DIGITS = tl.constexpr(12)
PROGRAMS_PER_TILE = 8  # over which the neighbourhoods of a tile of anchors are split


@triton.jit
def store_means(out, ANCHORS, sums, mass, row, slot, mask, dims, cols, T, scale, D, DV):
    """Stores the mean keys and values of `slot` of each anchor `row` [BM], and the log-weights with which the
    keys have the slots' masses (base 2, in units of 2^-DIGITS) at the anchors.

    `out` are the tensors of keys, values and weights, `sums` the sums of keys, values and of the weights in them.
    """
    OUT_K, OUT_V, OUT_W = out
    sum_k, sum_v, total = sums
    at = row * T + slot
    share = tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    mean = (sum_k * share).to(OUT_K.dtype.element_ty)
    # the log-weight belongs to the stored key. The anchor is read again rather than held in registers through the loops
    own = mask[:, None] & (dims < D)[None, :]
    a = tl.load(ANCHORS + row[:, None] * D + dims[None, :], mask=own, other=0.0, eviction_policy="evict_last")
    weight = mass + DIGITS - tl.sum(a * mean.to(tl.float32), 1) * scale
    tl.store(OUT_W + at, weight * LN_2, mask=mask)
    at = at[:, None]
    tl.store(OUT_K + at * D + dims[None, :], mean, mask=own)
    value = (sum_v * share).to(OUT_V.dtype.element_ty)
    tl.store(OUT_V + at * DV + cols[None, :], value, mask=mask[:, None] & (cols < DV)[None, :])


@triton.jit
def slots_kernel(
    ANCHORS,  # [B, H, CQ, D] fp32
    K,  # [B, Hkv, NK, BD] group-major, zeros behind column D
    V,  # [B, Hkv, NK, BDV] group-major, zeros behind column DV
    OFFSETS,  # [B, Hkv, CK + 1] int64
    MEMBERS,  # [B, Hkv, CK] int64: the groups, neighbourhood after neighbourhood
    ENDS,  # [B, Hkv, hoods + 1] int64: where in MEMBERS each neighbourhood begins
    SLOTS,  # [B, H, CQ, CK] int32
    MASS,  # [B, H, CQ, T] fp32
    OUT_K,  # [B, H, CQ, T, D]
    OUT_V,  # [B, H, CQ, T, DV]
    OUT_W,  # [B, H, CQ, T] fp32: log-weight of the slot's key
    H,
    heads_per_kv,
    CQ,
    CK,
    NK,
    T,
    single,
    hoods,
    span,
    tiles,
    parts,
    scale,  # times log2(e)
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BM anchors of a query head, and `span` neighbourhoods with all their K/V groups. Writes the means
    and the log-weights of the slots of these groups."""
    pid = tl.program_id(0)
    head = (pid // (tiles * parts)).to(tl.int64)
    part = pid // tiles % parts
    row = pid % tiles * BM + tl.arange(0, BM)
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BDV)
    kv_head = kv_head_of(head, H, heads_per_kv)
    K += kv_head * NK * BD
    V += kv_head * NK * BDV
    OFFSETS += kv_head * (CK + 1)
    MEMBERS += kv_head * CK
    ENDS += kv_head * (hoods + 1)
    # offsets inside a head fit in 32 bits
    ANCHORS += head * CQ * D
    SLOTS += head * CQ * CK
    MASS += head * CQ * T
    OUT_W += head * CQ * T
    OUT_K += head * CQ * T * D
    OUT_V += head * CQ * T * DV
    here = row < CQ
    a = load_matrix(ANCHORS, row, dims, CQ, D)
    out = (OUT_K, OUT_V, OUT_W)
    # a tile is near its base: offsets inside it fit in 32 bits, the base needs 64
    offsets = tl.arange(0, BN)
    k_tile = offsets[:, None] * BD + dims[None, :]
    v_tile = offsets[:, None] * BDV + cols[None, :]
    for hood in range(part * span, tl.minimum(part * span + span, hoods)):
        shared_k = tl.zeros([BM, BD], tl.float32)
        shared_v = tl.zeros([BM, BDV], tl.float32)
        shared_sum = tl.zeros([BM], tl.float32)
        for member in range(tl.load(ENDS + hood), tl.load(ENDS + hood + 1)):
            group = tl.load(MEMBERS + member).to(tl.int32)
            slot = tl.load(SLOTS + row * CK + group, mask=here, other=-1)
            k_base = K + tl.load(OFFSETS + group) * BD
            v_base = V + tl.load(OFFSETS + group) * BDV
            start = tl.load(OFFSETS + group).to(tl.int32)
            stop = tl.load(OFFSETS + group + 1).to(tl.int32)
            if (stop > start) & (tl.max(slot, 0) >= 0):
                mass = tl.load(MASS + row * T + slot, mask=slot >= 0, other=0.0) * LOG2_E - DIGITS
                own_k = tl.zeros([BM, BD], tl.float32)
                own_v = tl.zeros([BM, BDV], tl.float32)
                own_sum = tl.zeros([BM], tl.float32)
                # weights 2^(score - mass), and the sums of keys and values weighted by them
                for first in range(start, stop, BN):
                    live = offsets < stop - first
                    k = tl.load(k_base + (first - start) * BD + k_tile, mask=live[:, None], other=0.0)
                    scores = add_product(a, tl.trans(k), tl.zeros([BM, BN], tl.float32), 2, PRECISION)
                    p = tl.where(live[None, :], tl.exp2(scores * scale - mass[:, None]), 0.0)
                    rounded = p.to(k.dtype)
                    own_sum += tl.sum(rounded.to(tl.float32), 1)
                    own_k = tl.dot(rounded, k, own_k, input_precision=PRECISION)
                    v = tl.load(v_base + (first - start) * BDV + v_tile, mask=live[:, None], other=0.0)
                    own_v = tl.dot(p.to(v.dtype), v, own_v, input_precision=PRECISION)
                # an anchor without a slot here has added up something, and keeps nothing of it
                in_shared = slot >= single
                shared_k += tl.where(in_shared[:, None], own_k, 0.0)
                shared_v += tl.where(in_shared[:, None], own_v, 0.0)
                shared_sum += tl.where(in_shared, own_sum, 0.0)
                own = (slot >= 0) & (slot < single) & (mass != -float("inf"))
                sums = (own_k, own_v, own_sum)
                store_means(out, ANCHORS, sums, mass, row, slot, own, dims, cols, T, scale, D, DV)
        # without shared slots there is one neighbourhood all the same, of groups with slots of their own
        shared = here & (single + hood < T)
        mass = tl.load(MASS + row * T + single + hood, mask=shared, other=0.0) * LOG2_E - DIGITS
        sums = (shared_k, shared_v, shared_sum)
        store_means(out, ANCHORS, sums, mass, row, single + hood, shared, dims, cols, T, scale, D, DV)
    # unused slots: zeros, switched off
    per_part = (single + parts - 1) // parts
    for slot in range(part * per_part, tl.minimum(part * per_part + per_part, single)):
        empty = tl.load(MASS + row * T + slot, mask=here, other=0.0) == -float("inf")
        at = (row * T + slot)[:, None]
        tl.store(OUT_W + row * T + slot, tl.full([BM], -float("inf"), tl.float32), mask=empty)
        no_k, no_v = tl.zeros([BM, BD], OUT_K.dtype.element_ty), tl.zeros([BM, BDV], OUT_V.dtype.element_ty)
        tl.store(OUT_K + at * D + dims[None, :], no_k, mask=empty[:, None] & (dims < D)[None, :])
        tl.store(OUT_V + at * DV + cols[None, :], no_v, mask=empty[:, None] & (cols < DV)[None, :])


def tiles_for(width: int, dtype: torch.dtype) -> Tiles:
    """Tile sizes that pass the compile gate."""
    if dtype == torch.float32:
        return Tiles(16, 16, 8, 2 if width <= 64 else 1)
    return Tiles(32, 32, 8, 2) if width <= 128 else Tiles(16, 16, 8, 2)


def slot_means(
    anchors: Tensor,
    keys: Tensor,
    values: Tensor,
    offsets: Tensor,
    members: Tensor,
    ends: Tensor,
    slots: Tensor,
    log_mass: Tensor,
    scale: float,
    value_dim: int,
    single: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """anchors [B, H, Cq, D], keys and values [B, Hkv, Nk, padded] group-major, offsets [B, Hkv, Ck + 1],
    members [B, Hkv, Ck] and ends [B, Hkv, hoods + 1] (groups by neighbourhood), slots [B, H, Cq, Ck] int32,
    log_mass [B, H, Cq, T] -> keys [B, H, Cq, T, D] and values [B, H, Cq, T, Dv] in the dtypes of their
    sources, log-weights [B, H, Cq, T] fp32"""
    batch, heads, cq, dim = anchors.shape
    kv_heads, count, width = keys.shape[1:]
    room, hoods = log_mass.shape[-1], ends.shape[-1] - 1
    make = torch.empty if slots.numel() and count else torch.zeros
    out_keys = make(batch, heads, cq, room, dim, dtype=keys.dtype, device=keys.device)
    out_values = make(batch, heads, cq, room, value_dim, dtype=values.dtype, device=keys.device)
    log_mass = log_mass.float().contiguous()
    if not log_mass.numel() or not slots.numel() or not count:
        return out_keys, out_values, log_mass
    weight = torch.empty_like(log_mass)
    size = tiles_for(max(width, values.shape[-1]), keys.dtype)
    tiles = cdiv(cq, size.rows)
    parts = max(1, min(PROGRAMS_PER_TILE, hoods))
    read = (anchors.float().contiguous(), keys, values, offsets.contiguous(), members.contiguous(), ends.contiguous())
    tensors = (*read, slots.int().contiguous(), log_mass, out_keys, out_values, weight)
    counts = (heads, heads // kv_heads, cq, slots.shape[-1], count, room, single, hoods)
    sizes = (*counts, cdiv(hoods, parts), tiles, parts, scale * LOG2_E.value)
    blocks = {"D": dim, "DV": value_dim, "BM": size.rows, "BN": size.keys, "BD": padded(dim), "BDV": padded(value_dim)}
    fits = "tf32x3" if max(width, values.shape[-1]) <= 128 else "tf32"  # for fp32: what fits into the registers
    slots_kernel[(batch * heads * tiles * parts,)](*tensors, *sizes, **blocks, PRECISION=fits, **size.options)
    return out_keys, out_values, weight

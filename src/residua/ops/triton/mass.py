"""Exact attention mass of every K/V group at every anchor: the router's scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import LN_2, LOG2_E, add_product, kv_head_of, load_matrix
from .shapes import Tiles, cdiv, padded, precision

GROUPS_PER_PROGRAM = 8  # K/V groups that one tile of anchors meets while it is at hand


@triton.jit
def mass_kernel(
    ANCHORS,  # [B, H, CQ, D] fp32
    K,  # [B, Hkv, NK, BD] group-major, zeros behind column D
    OFFSETS,  # [B, Hkv, CK + 1] int64
    OUT,  # [B, H, CQ, CK] fp32
    H,
    heads_per_kv,
    CQ,
    CK,
    NK,
    tiles,
    spans,
    scale,  # times log2(e)
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BM anchors of a query head and SPAN K/V groups. OUT = the natural log-sum-exp of each anchor's
    scores with the keys of each group, -inf for a group without keys."""
    pid = tl.program_id(0)
    head = (pid // (tiles * spans)).to(tl.int64)
    span = pid // tiles % spans
    anchors = pid % tiles * BM + tl.arange(0, BM)
    dims = tl.arange(0, BD)
    kv_head = kv_head_of(head, H, heads_per_kv)
    K += kv_head * NK * BD
    OFFSETS += kv_head * (CK + 1)
    ANCHORS += head * CQ * D
    a = load_matrix(ANCHORS, anchors, dims, CQ, D)
    # a tile is near its base: offsets inside it fit in 32 bits, the base needs 64
    offsets = tl.arange(0, BN)
    k_tile = offsets[None, :] * BD + dims[:, None]
    for group in range(span * SPAN, tl.minimum(span * SPAN + SPAN, CK)):
        base = K + tl.load(OFFSETS + group) * BD
        start = tl.load(OFFSETS + group).to(tl.int32)
        stop = tl.load(OFFSETS + group + 1).to(tl.int32)
        top = tl.full([BM], -float("inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        for first in range(start, stop, BN):
            live = offsets < stop - first
            k = tl.load(base + (first - start) * BD + k_tile, mask=live[None, :], other=0.0)
            scores = add_product(a, k, tl.zeros([BM, BN], tl.float32), 2, PRECISION) * scale
            scores = tl.where(live[None, :], scores, -float("inf"))
            # online log-sum-exp: the new maximum, the old total rescaled to it
            new_top = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
            top = new_top
        # log2 of a total of 0 is the -inf of an empty group
        mass = (tl.where(top == -float("inf"), 0.0, top) + tl.log2(total)) * LN_2
        tl.store(OUT + (head * CQ + anchors) * CK + group, mass, mask=anchors < CQ)


def tiles_for(width: int, dtype: torch.dtype) -> Tiles:
    """Tile sizes that pass the compile gate."""
    if dtype == torch.float32:
        return Tiles(16, 32, 8, 2) if width <= 128 else Tiles(16, 16, 8, 1)
    return Tiles(64, 32, 4, 2) if width <= 128 else Tiles(32, 32, 8, 2)


def cell_mass(anchors: Tensor, keys: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """anchors [B, H, Cq, D], keys [B, Hkv, Nk, padded D] group-major, offsets [B, Hkv, Ck + 1]
    -> [B, H, Cq, Ck] fp32"""
    batch, heads, cq, dim = anchors.shape
    kv_heads, count, width = keys.shape[1:]
    groups = offsets.shape[-1] - 1
    out = torch.empty(batch, heads, cq, groups, dtype=torch.float32, device=keys.device)
    if out.numel() == 0:
        return out
    size = tiles_for(width, keys.dtype)
    tiles, spans = cdiv(cq, size.rows), cdiv(groups, GROUPS_PER_PROGRAM)
    tensors = (anchors.float().contiguous(), keys, offsets.contiguous(), out)
    sizes = (heads, heads // kv_heads, cq, groups, count, tiles, spans, scale * LOG2_E.value)
    blocks = {"D": dim, "BM": size.rows, "BN": size.keys, "BD": padded(dim), "SPAN": GROUPS_PER_PROGRAM}
    mass_kernel[(batch * heads * tiles * spans,)](
        *tensors, *sizes, **blocks, PRECISION=precision(keys.dtype, width), **size.options
    )
    return out

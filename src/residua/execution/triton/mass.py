"""Exact attention mass of every K/V group at every anchor: the router's scores."""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .shapes import cdiv

GROUPS_PER_PROGRAM = 8  # K/V groups that one tile of anchors meets while it is in the cache


@triton.jit
def mass_kernel(
    ANCHORS,  # [B, H, CQ, D] fp32
    K,  # [B, Hkv, NK, D] strided
    ORDER,  # [B, Hkv, NK] int64
    OFFSETS,  # [B, Hkv, CK + 1] int64
    OUT,  # [B, H, CQ, CK] fp32
    H,
    shares,
    CQ,
    CK,
    NK,
    sb,
    sh,
    sn,
    sd,
    tiles,
    spans,
    scale,  # times log2(e)
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    SPAN: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // (tiles * spans)).to(tl.int64)
    span = pid // tiles % spans
    anchors = pid % tiles * BM + tl.arange(0, BM)
    kv_head = head // H * (H // shares) + head % H // shares
    K += head // H * sb + head % H // shares * sh
    ORDER += kv_head * NK
    OFFSETS += kv_head * (CK + 1)
    ANCHORS += head * CQ * D
    for group in range(span * SPAN, tl.minimum(span * SPAN + SPAN, CK)):
        start = tl.load(OFFSETS + group).to(tl.int32)
        stop = tl.load(OFFSETS + group + 1).to(tl.int32)
        top = tl.full([BM], -float("inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        for first in range(start, stop, BN):
            index = first + tl.arange(0, BN)
            rows = tl.load(ORDER + index, mask=index < stop, other=0)
            scores = tl.zeros([BM, BN], tl.float32)
            for column in range(0, D, BD):
                dims = column + tl.arange(0, BD)
                a_mask = (anchors < CQ)[:, None] & (dims < D)[None, :]
                a = tl.load(ANCHORS + anchors[:, None] * D + dims[None, :], mask=a_mask, other=0.0)
                k_mask = (index < stop)[None, :] & (dims < D)[:, None]
                k = tl.load(K + rows[None, :] * sn + dims[:, None] * sd, mask=k_mask, other=0.0)
                scores = tl.dot(a, k.to(tl.float32), scores, input_precision="tf32x3")
            scores *= scale
            scores = tl.where((index < stop)[None, :], scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
            top = new_top
        # log2 of a total of 0 is the -inf of an empty group
        mass = (tl.where(top == -float("inf"), 0.0, top) + tl.log2(total)) * 0.6931471805599453
        tl.store(OUT + (head * CQ + anchors) * CK + group, mass, mask=anchors < CQ)


def cell_mass(anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
    """anchors [B, H, Cq, D] fp32, k [B, Hkv, Nk, D] -> [B, H, Cq, Ck] fp32"""
    batch, heads, cq, dim = anchors.shape
    kv_heads, count = k.shape[1:3]
    out = torch.empty(batch, heads, cq, kv.groups, dtype=torch.float32, device=k.device)
    if out.numel() == 0:
        return out
    rows = 64
    tiles, spans = cdiv(cq, rows), cdiv(kv.groups, GROUPS_PER_PROGRAM)
    mass_kernel[(batch * heads * tiles * spans,)](
        anchors.float().contiguous(),
        k,
        kv.order.contiguous(),
        kv.offsets.contiguous(),
        out,
        heads,
        heads // kv_heads,
        cq,
        kv.groups,
        count,
        *k.stride(),
        tiles,
        spans,
        scale * math.log2(math.e),
        D=dim,
        BM=rows,
        BN=64,
        BD=32,
        SPAN=GROUPS_PER_PROGRAM,
        num_warps=8,
        num_stages=2,
    )
    return out

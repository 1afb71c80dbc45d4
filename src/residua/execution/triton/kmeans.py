"""One Lloyd step: distance and argmin fused, so that the [N, C] distances never exist."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .segments import segment_means, sort_labels
from .shapes import cdiv


@triton.jit
def assign_kernel(
    X,  # [G, N, R] fp32
    CENTRES,  # [G, C, R] fp32
    HALF,  # [G, C] fp32, half the squared length of each centre
    VALID,  # [G, N] uint8, or any pointer
    LABELS,  # [G, N] int64
    N,
    C,
    tiles,
    R: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    MASKED: tl.constexpr,
):
    pid = tl.program_id(0)
    group = (pid // tiles).to(tl.int64)
    rows = (pid % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    X += group * N * R
    CENTRES += group * C * R
    best = tl.full([BN], float("inf"), tl.float32)
    label = tl.zeros([BN], tl.int32)
    for start in range(0, C, BC):
        ids = start + tl.arange(0, BC)
        products = tl.zeros([BN, BC], tl.float32)
        for first in range(0, R, BR):
            dims = first + tl.arange(0, BR)
            x = tl.load(
                X + rows[:, None] * R + dims[None, :],
                mask=(rows < N)[:, None] & (dims < R)[None, :],
                other=0.0,
            )
            c = tl.load(
                CENTRES + ids[None, :] * R + dims[:, None],
                mask=(ids < C)[None, :] & (dims < R)[:, None],
                other=0.0,
            )
            products = tl.dot(x, c, products, input_precision="tf32x3")
        half = tl.load(HALF + group * C + ids, mask=ids < C, other=float("inf"))
        # |x|^2 is the same for every centre, so the nearest has the least |c|^2 / 2 - x.c
        distance = half[None, :] - products
        least, index = tl.min(distance, 1, return_indices=True)
        # "less than" keeps the lowest index among ties, and 0 for a row of NaN
        closer = least < best
        best = tl.where(closer, least, best)
        label = tl.where(closer, start + index, label)
    if MASKED:
        valid = tl.load(VALID + group * N + rows, mask=rows < N, other=0)
        label = tl.where(valid != 0, label, -1)
    tl.store(LABELS + group * N + rows, label.to(tl.int64), mask=rows < N)


def assign(x: Tensor, centres: Tensor, valid: Tensor | None) -> Tensor:
    """Index of the nearest centre of every row, -1 where not valid.  # [G, N] int64"""
    groups, count, rank = x.shape
    labels = torch.empty(groups, count, dtype=torch.long, device=x.device)
    if labels.numel() == 0:
        return labels
    rows, step = 128, 64
    tiles = cdiv(count, rows)
    assign_kernel[(groups * tiles,)](
        x.contiguous(),
        centres.contiguous(),
        centres.square().sum(-1).mul_(0.5),
        labels if valid is None else valid.contiguous().view(torch.uint8),
        labels,
        count,
        centres.shape[1],
        tiles,
        R=rank,
        BN=rows,
        BC=step,
        BR=32,
        MASKED=valid is not None,
        num_warps=8,
        num_stages=2,
    )
    return labels


def kmeans_step(x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """-> labels [G, N] int64, centres [G, C, R] fp32, sizes [G, C] int64; no host synchronisation"""
    labels = assign(x, centres, valid)
    order, offsets = sort_labels(labels, centres.shape[1])
    means = segment_means(x[None], order[None], offsets[None], centres[None])[0]
    return labels, means, offsets.diff(dim=-1)

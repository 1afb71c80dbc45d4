"""All Lloyd steps of a small clustering in one launch: one program per head, rows and centres in the cache.

The sums of a step are products with a one-hot matrix, so the order of additions is fixed. Rows and centres
are split into two parts of 16 bits, as in kmeans.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import finite_fp16
from .shapes import WARP_GROUP_GPUS, architecture, padded

MAX_ROWS, MAX_CENTRES, MAX_RANK = 4096, 64, 128


@triton.jit
def small_kmeans_kernel(
    X,  # [G, N, R] fp32
    CENTRES,  # [G, C, R] fp32, overwritten
    AGAIN,  # the same tensor
    LABELS,  # [G, N] int64
    SIZES,  # [G, C] int64
    N,
    C,
    steps,
    R: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    SWAP: tl.constexpr,
):
    """One program: one head, all `steps`. CENTRES = the means of the last step, LABELS and SIZES its assignment."""
    head = tl.program_id(0).to(tl.int64)
    X += head * N * R
    CENTRES += head * C * R
    AGAIN += head * C * R
    dims = tl.arange(0, BR)
    ids = tl.arange(0, BC)
    mask = (ids < C)[:, None] & (dims < R)[None, :]
    for _ in range(0, steps):
        # the centres in two parts of fp16
        c = finite_fp16(tl.load(CENTRES + ids[:, None] * R + dims[None, :], mask=mask, other=0.0))
        half = tl.where(ids < C, tl.sum(c * c, 1) * 0.5, float("inf"))
        c_high = c.to(tl.float16)
        c_low = (c - c_high.to(tl.float32)).to(tl.float16)
        sums = tl.zeros([BC, BR], tl.float32)
        sizes = tl.zeros([BC], tl.int32)
        for first in tl.range(0, N, BN, num_stages=1):
            rows = first + tl.arange(0, BN)
            # BN rows in two parts, and their products with all centres
            x_mask = (rows < N)[:, None] & (dims < R)[None, :]
            x = finite_fp16(tl.load(X + rows[:, None] * R + dims[None, :], mask=x_mask, other=0.0))
            high = x.to(tl.float16)
            low = (x - high.to(tl.float32)).to(tl.float16)
            if SWAP:  # every warp holds all of the left operand
                products = tl.dot(high, tl.trans(c_high))
                products = tl.dot(high, tl.trans(c_low), products)
                products = tl.trans(tl.dot(low, tl.trans(c_high), products))
            else:
                products = tl.dot(c_high, tl.trans(high))  # [BC, BN]
                products = tl.dot(c_low, tl.trans(high), products)
                products = tl.dot(c_high, tl.trans(low), products)
            # the nearest centre, the lowest index among ties
            distance = half[:, None] - products
            nearest = tl.min(distance, 0)
            label = tl.min(tl.where(distance == nearest[None, :], ids[:, None], C), 0)
            label = tl.where(nearest == float("inf"), 0, label)
            # the sums of the rows of each centre
            mine = (ids[:, None] == label[None, :]) & (rows < N)[None, :]
            one_hot = mine.to(tl.float32).to(tl.float16)
            sums = tl.dot(one_hot, high, sums)
            sums = tl.dot(one_hot, low, sums)
            sizes += tl.sum(mine.to(tl.int32), 1)
            tl.store(LABELS + head * N + rows, label.to(tl.int64), mask=rows < N)
        means = sums / tl.maximum(sizes, 1).to(tl.float32)[:, None]
        # an empty group keeps its centre. By a second name of the same tensor: its addresses would otherwise
        # be held in registers through the loop
        tl.store(AGAIN + ids[:, None] * R + dims[None, :], means, mask=mask & (sizes > 0)[:, None])
        tl.store(SIZES + head * C + ids, sizes.to(tl.int64), mask=ids < C)
        tl.debug_barrier()  # the next step reads the centres with other threads


def fits(x: Tensor, centres: Tensor, valid: Tensor | None) -> bool:
    """Whether one program can hold what a step needs."""
    small = x.shape[1] <= MAX_ROWS and centres.shape[1] <= MAX_CENTRES and x.shape[2] <= MAX_RANK
    return small and valid is None and x.numel() > 0 and centres.numel() > 0


def small_kmeans(x: Tensor, centres: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [G, N, R] fp32, centres [G, C, R] -> labels [G, N] int64, centres, sizes [G, C] int64"""
    heads, count, rank = x.shape
    centres = centres.clone(memory_format=torch.contiguous_format)
    labels = torch.empty(heads, count, dtype=torch.long, device=x.device)
    sizes = torch.empty(heads, centres.shape[1], dtype=torch.long, device=x.device)
    alone = architecture() not in WARP_GROUP_GPUS  # warps multiply one by one
    tensors = (x.contiguous(), centres, centres, labels, sizes)
    blocks = {"R": rank, "BN": 16 if alone else 32, "BC": padded(centres.shape[1]), "BR": padded(rank), "SWAP": alone}
    small_kmeans_kernel[(heads,)](*tensors, count, centres.shape[1], steps, **blocks, num_warps=8, num_stages=1)
    return labels, centres, sizes

"""Means of groups as sums over sorted segments: the order of additions is fixed, no float atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import group_ends, head_start, load_rows
from .shapes import padded


@triton.jit
def segment_mean_kernel(
    X,  # [B, H, N, D] strided
    ORDER,  # [B, H, N] int64
    OFFSETS,  # [B, H, C + 1] int64
    SPARE,  # [B, H, C, D] fp32: the mean of an empty group, or None: 0
    OUT,  # [B, H, C, D] fp32
    SORTED,  # [B, H, N, BD] like X, or None: the rows in group order, zeros behind column D
    H,
    N,
    C,
    strides,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    FINITE: tl.constexpr,  # what is not counts as 0
):
    """One program: one group. OUT = the mean of its rows, summed BN at a time in the order of the partition."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid // C
    dims = tl.arange(0, BD)
    X = head_start(X, strides, head, H)
    start, stop = group_ends(OFFSETS, pid, head)
    acc = tl.zeros([BN, BD], tl.float32)
    for first in range(start, stop, BN):
        index = first + tl.arange(0, BN)
        rows = tl.load(ORDER + head * N + index, mask=index < stop, other=0)
        x = load_rows(X, strides, rows, dims, index < stop, D)
        if SORTED is not None:
            at = (head * N + index)[:, None] * BD + dims[None, :]
            tl.store(SORTED + at, x, mask=(index < stop)[:, None])
        x = x.to(tl.float32)
        if FINITE:
            x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        acc += x
    count = stop - start
    mean = tl.sum(acc, 0) / tl.maximum(count, 1).to(tl.float32)
    if SPARE is not None:
        mean = tl.where(count > 0, mean, tl.load(SPARE + pid * D + dims, mask=dims < D, other=0.0))
    tl.store(OUT + pid * D + dims, mean, mask=dims < D)


def segment_means(
    x: Tensor,
    order: Tensor,
    offsets: Tensor,
    spare: Tensor | None = None,
    finite: bool = False,
    keep: Tensor | None = None,
) -> Tensor:
    """Mean of `x[order[offsets[g]:offsets[g + 1]]]`; an empty group gets its row of `spare`, or 0. With
    `finite`, what is not counts as 0. The rows are put into `keep` [B, H, N, padded D] in their new order, if
    that is given; what belongs to no group is left as it was.

    x [B, H, N, D], order [B, H, N] int64, offsets [B, H, C + 1] int64 -> [B, H, C, D] fp32
    """
    batch, heads, count, dim = x.shape
    groups = offsets.shape[-1] - 1
    out = torch.empty(batch, heads, groups, dim, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    spare = None if spare is None else spare.contiguous()
    tensors = (x, order.contiguous(), offsets.contiguous(), spare, out, keep)
    sizes = (heads, count, groups, x.stride())
    blocks = {"D": dim, "BN": 32, "BD": padded(dim), "FINITE": finite}
    segment_mean_kernel[(batch * heads * groups,)](*tensors, *sizes, **blocks, num_warps=4, num_stages=2)
    return out

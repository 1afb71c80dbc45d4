"""Means of groups as sums over sorted segments: the order of additions is fixed, no float atomics."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import padded


@triton.jit
def segment_mean_kernel(
    X,  # [B, H, N, D] strided
    ORDER,  # [B, H, N] int64
    OFFSETS,  # [B, H, C + 1] int64
    SPARE,  # [B, H, C, D] fp32: the mean of an empty group, or any pointer
    OUT,  # [B, H, C, D] fp32
    SORTED,  # [B, H, N, BD] like X, or any pointer
    H,
    N,
    C,
    sb,
    sh,
    sn,
    sd,
    D: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    HAS_SPARE: tl.constexpr,
    FINITE: tl.constexpr,  # what is not counts as 0
    KEEP: tl.constexpr,  # whether the rows are stored in group order, with zeros behind column D
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid // C
    dims = tl.arange(0, BD)
    X += head // H * sb + head % H * sh
    start = tl.load(OFFSETS + pid + head).to(tl.int32)  # a row of offsets has C + 1 entries
    stop = tl.load(OFFSETS + pid + head + 1).to(tl.int32)
    acc = tl.zeros([BN, BD], tl.float32)
    for first in range(start, stop, BN):
        index = first + tl.arange(0, BN)
        rows = tl.load(ORDER + head * N + index, mask=index < stop, other=0)
        mask = (index < stop)[:, None] & (dims < D)[None, :]
        x = tl.load(X + rows[:, None] * sn + dims[None, :] * sd, mask=mask, other=0.0)
        if KEEP:
            at = (head * N + index)[:, None] * BD + dims[None, :]
            tl.store(SORTED + at, x, mask=(index < stop)[:, None])
        x = x.to(tl.float32)
        if FINITE:
            x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        acc += x
    count = stop - start
    mean = tl.sum(acc, 0) / tl.maximum(count, 1).to(tl.float32)
    if HAS_SPARE:
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
    segment_mean_kernel[(batch * heads * groups,)](
        x,
        order.contiguous(),
        offsets.contiguous(),
        out if spare is None else spare.contiguous(),
        out,
        out if keep is None else keep,
        heads,
        count,
        groups,
        *x.stride(),
        D=dim,
        BN=32,
        BD=padded(dim),
        HAS_SPARE=spare is not None,
        FINITE=finite,
        KEEP=keep is not None,
        num_warps=4,
        num_stages=2,
    )
    return out

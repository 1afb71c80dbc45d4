"""How coordinates and values vary together inside each K/V group: one program per group, two passes over its
rows. The second finds them in the cache."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .shapes import padded


@triton.jit
def covariance_kernel(
    X,  # [B, H, N, R] strided
    V,  # [B, H, N, DV] strided
    ORDER,  # [B, H, N] int64
    OFFSETS,  # [B, H, C + 1] int64
    COVARIANCE,  # [B, H, C, R, DV] fp32
    VARIANCE,  # [B, H, C, R] fp32
    H,
    N,
    C,
    R,
    xb,
    xh,
    xn,
    xd,
    vb,
    vh,
    vn,
    vd,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BDV: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid // C
    X += head // H * xb + head % H * xh
    V += head // H * vb + head % H * vh
    ORDER += head * N
    ranks = tl.arange(0, BR)
    cols = tl.arange(0, BDV)
    start = tl.load(OFFSETS + pid + head).to(tl.int32)  # a row of offsets has C + 1 entries
    stop = tl.load(OFFSETS + pid + head + 1).to(tl.int32)
    count = tl.maximum(stop - start, 1).to(tl.float32)

    x_sum = tl.zeros([BR, BN], tl.float32)
    v_sum = tl.zeros([BN, BDV], tl.float32)
    for first in range(start, stop, BN):
        index = first + tl.arange(0, BN)
        rows = tl.load(ORDER + index, mask=index < stop, other=0)
        x_mask = (ranks < R)[:, None] & (index < stop)[None, :]
        x_sum += tl.load(X + rows[None, :] * xn + ranks[:, None] * xd, mask=x_mask, other=0.0).to(tl.float32)
        v_mask = (index < stop)[:, None] & (cols < DV)[None, :]
        v_sum += tl.load(V + rows[:, None] * vn + cols[None, :] * vd, mask=v_mask, other=0.0).to(tl.float32)
    x_mean = tl.sum(x_sum, 1) / count
    v_mean = tl.sum(v_sum, 0) / count

    together = tl.zeros([BR, BDV], tl.float32)
    squares = tl.zeros([BR, BN], tl.float32)
    for first in range(start, stop, BN):
        index = first + tl.arange(0, BN)
        rows = tl.load(ORDER + index, mask=index < stop, other=0)
        x_mask = (ranks < R)[:, None] & (index < stop)[None, :]
        x = tl.load(X + rows[None, :] * xn + ranks[:, None] * xd, mask=x_mask, other=0.0).to(tl.float32)
        x = tl.where(x_mask, x - x_mean[:, None], 0.0)
        v_mask = (index < stop)[:, None] & (cols < DV)[None, :]
        v = tl.load(V + rows[:, None] * vn + cols[None, :] * vd, mask=v_mask, other=0.0).to(tl.float32)
        v = tl.where(v_mask, v - v_mean[None, :], 0.0)
        squares += x * x
        together = tl.dot(x, v, together, input_precision="tf32x3")
    tl.store(VARIANCE + pid * R + ranks, tl.sum(squares, 1) / count, mask=ranks < R)
    at = (pid * R + ranks)[:, None] * DV + cols[None, :]
    tl.store(COVARIANCE + at, together / count, mask=(ranks < R)[:, None] & (cols < DV)[None, :])


def group_covariance(x: Tensor, v: Tensor, kv: Partition) -> tuple[Tensor, Tensor]:
    """x [B, Hkv, N, R] fp32, v [B, Hkv, N, Dv] -> covariance [B, Hkv, Ck, R, Dv], variance [B, Hkv, Ck, R]"""
    batch, heads, count, rank = x.shape
    value_dim, groups = v.shape[-1], kv.groups
    covariance = torch.empty(batch, heads, groups, rank, value_dim, dtype=torch.float32, device=x.device)
    variance = torch.empty(batch, heads, groups, rank, dtype=torch.float32, device=x.device)
    if covariance.numel() == 0:
        return covariance, variance.zero_()
    covariance_kernel[(batch * heads * groups,)](
        x,
        v,
        kv.order.contiguous(),
        kv.offsets.contiguous(),
        covariance,
        variance,
        heads,
        count,
        groups,
        rank,
        *x.stride(),
        *v.stride(),
        DV=value_dim,
        BN=32 if value_dim <= 128 else 16,
        BR=padded(rank),
        BDV=padded(value_dim),
        num_warps=4,
        num_stages=2,
    )
    return covariance, variance

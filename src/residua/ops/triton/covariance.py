"""How coordinates and values vary together, one program per group: inside each K/V group, from the keys themselves
and in one pass; among the groups of each neighbourhood, from coordinates, in two passes of which the second finds
its rows in the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .device_functions import add_product, group_ends, head_start, load_rows
from .nonfinite import note_lost
from .shapes import FRUGAL_GPUS, architecture, padded


@triton.jit
def covariance_kernel(
    X,  # [B, H, N, R] strided
    V,  # [B, H, N, DV] strided
    ORDER,  # [B, H, N] int64
    OFFSETS,  # [B, H, C + 1] int64
    COUNTED,  # [B, H, N + 1] int64, offsets of the groups that the rows stand for: empty ones do not count
    COVARIANCE,  # [B, H, >= C, R, DV]
    VARIANCE,  # [B, H, >= C, R]
    H,
    N,
    C,
    R,
    free,  # rows that count, at most
    room,  # from one head of COVARIANCE and VARIANCE to the next
    x_strides,
    v_strides,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BDV: tl.constexpr,
):
    """One program: one neighbourhood, whose rows stand for K/V groups. COVARIANCE = mean of (x - mean x)^T (v - mean v)
    and VARIANCE = mean of (x - mean x)^2 over the rows that count; what is not finite becomes 0."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid // C
    X = head_start(X, x_strides, head, H)
    V = head_start(V, v_strides, head, H)
    ORDER += head * N
    ranks = tl.arange(0, BR)
    cols = tl.arange(0, BDV)
    start, stop = group_ends(OFFSETS, pid, head)
    number = tl.zeros([BN], tl.int32)
    COUNTED += head * (N + 1)
    # the means
    x_sum = tl.zeros([BR, BN], tl.float32)
    v_sum = tl.zeros([BN, BDV], tl.float32)
    for first in range(start, stop, BN):
        index = first + tl.arange(0, BN)
        x, v, live = _counted_rows(X, V, ORDER, COUNTED, index, stop, free, ranks, cols, x_strides, v_strides, R, DV)
        number += live.to(tl.int32)
        x_sum += x
        v_sum += v
    count = tl.maximum(tl.sum(number, 0), 1).to(tl.float32)
    x_mean = tl.sum(x_sum, 1) / count
    v_mean = tl.sum(v_sum, 0) / count

    # the products; the rows are still in the cache
    together = tl.zeros([BR, BDV], tl.float32)
    squares = tl.zeros([BR, BN], tl.float32)
    for first in range(start, stop, BN):
        index = first + tl.arange(0, BN)
        x, v, live = _counted_rows(X, V, ORDER, COUNTED, index, stop, free, ranks, cols, x_strides, v_strides, R, DV)
        x = tl.where((ranks < R)[:, None] & live[None, :], x - x_mean[:, None], 0.0)
        v = tl.where(live[:, None] & (cols < DV)[None, :], v - v_mean[None, :], 0.0)
        squares += x * x
        together = tl.dot(x, v, together, input_precision="tf32x3")
    variance = tl.sum(squares, 1) / count
    together /= count
    variance = tl.where(tl.abs(variance) < float("inf"), variance, 0.0)  # what is not finite counts as 0
    together = tl.where(tl.abs(together) < float("inf"), together, 0.0)
    _store(COVARIANCE, VARIANCE, head * room + pid % C, together, variance, ranks, cols, R, DV)


@triton.jit
def _counted_rows(X, V, ORDER, COUNTED, index, stop, free, ranks, cols, x_strides, v_strides, R, DV):
    """Coordinates [BR, BN] and values [BN, BDV] of rows ORDER[index], index < stop, fp32, and which of them count."""
    rows = tl.load(ORDER + index, mask=index < stop, other=0)
    live = (index < stop) & (rows < free) & (tl.load(COUNTED + rows + 1) > tl.load(COUNTED + rows))
    at = X + rows[None, :] * x_strides[2] + ranks[:, None] * x_strides[3]
    x = tl.load(at, mask=(ranks < R)[:, None] & live[None, :], other=0.0)
    return x.to(tl.float32), load_rows(V, v_strides, rows, cols, live, DV).to(tl.float32), live


@triton.jit
def _store(COVARIANCE, VARIANCE, place, covariance, variance, ranks, cols, R, DV):
    """Stores covariance [BR, BDV] and variance [BR] as entry `place`."""
    tl.store(VARIANCE + place * R + ranks, variance.to(VARIANCE.dtype.element_ty), mask=ranks < R)
    at = (place * R + ranks)[:, None] * DV + cols[None, :]
    mask = (ranks < R)[:, None] & (cols < DV)[None, :]
    tl.store(COVARIANCE + at, covariance.to(COVARIANCE.dtype.element_ty), mask=mask)


def among_covariance(
    x: Tensor, v: Tensor, members: Tensor, ends: Tensor, kv: Partition, free: int, into: tuple[Tensor, Tensor]
) -> None:
    """How groups lie around each other in their neighbourhoods: coordinates x [B, Hkv, Ck, R] and mean values
    v [B, Hkv, Ck, Dv] of the first `free` groups, of which empty ones do not count. members [B, Hkv, Ck] and
    ends [B, Hkv, P + 1] -> the last P covariances [B, Hkv, Ck + P, R, Dv] and variances of `into`, finite."""
    batch, heads, groups, rank = x.shape
    covariance, variance = (whole[:, :, groups:] for whole in into)
    if not covariance.numel():
        return
    pools, value_dim = ends.shape[-1] - 1, v.shape[-1]
    tensors = (x, v, members.contiguous(), ends.contiguous(), kv.offsets.contiguous(), covariance, variance)
    sizes = (heads, groups, pools, rank, free, variance.stride(1) // max(1, rank), x.stride(), v.stride())
    blocks = {"DV": value_dim, "BN": 16, "BR": padded(rank), "BDV": padded(value_dim)}
    warps = 4 if architecture() in FRUGAL_GPUS else 8
    covariance_kernel[(batch * heads * pools,)](*tensors, *sizes, **blocks, num_warps=warps, num_stages=2)


@triton.jit
def key_covariance_kernel(
    K,  # [B, H, N, BD] group-major, zeros behind column D
    V,  # [B, H, N, DV] strided: group-major, or in the original order with SORTED
    ORDER,  # [B, H, N] int64
    SORTED,  # [B, H, N, BDV], or None: V group-major, written
    LOST,  # [B, H, DV] int32, zeros, or None: channels of V that are not finite, written with SORTED
    FACTOR,  # [B, H, D, R] fp32
    CENTROIDS,  # [B, H, C, D] fp32
    OFFSETS,  # [B, H, C + 1] int64
    COVARIANCE,  # [B, H, >= C, R, DV]
    VARIANCE,  # [B, H, >= C, R]
    MEANS,  # [B, H, C, DV] fp32, or None: means of the values, written
    H,
    N,
    C,
    R,
    room,  # from one head of COVARIANCE and VARIANCE to the next
    v_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BDV: tl.constexpr,
):
    """One program: one group. The same as `covariance_kernel` for the coordinates x = key @ factor, in one pass over
    the keys; x lies around that of the group's centroid."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid // C
    K += head * N * BD
    V = head_start(V, v_strides, head, H)
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BDV)
    ranks = tl.arange(0, BR)
    inside = (ranks < R)[:, None] & (dims < D)[None, :]
    factor = tl.load(FACTOR + (head * D + dims[None, :]) * R + ranks[:, None], mask=inside, other=0.0)
    centroid = tl.load(CENTROIDS + pid * D + dims, mask=dims < D, other=0.0)
    # coordinates are linear in the keys. Off their mean they add up to 0, so the values may keep theirs
    middle = tl.sum(factor * centroid[None, :], 1)[:, None]
    start = tl.load(OFFSETS + pid + head)
    size = (tl.load(OFFSETS + pid + head + 1) - start).to(tl.int32)
    K += start * BD
    if SORTED is None:
        V += start * v_strides[2]
    else:
        ORDER += head * N + start
        SORTED += (head * N + start) * BDV
    together = tl.zeros([BR, BDV], tl.float32)
    squares = tl.zeros([BR, BN], tl.float32)
    mean = tl.zeros([BDV], tl.float32)
    for first in range(0, size, BN):
        rows = first + tl.arange(0, BN)
        live = rows < size
        k = tl.load(K + rows[None, :] * BD + dims[:, None], mask=live[None, :], other=0.0)
        source = rows if SORTED is None else tl.load(ORDER + rows, mask=live, other=0)
        v = load_rows(V, v_strides, source, cols, live, DV)
        if SORTED is not None:
            tl.store(SORTED + rows[:, None] * BDV + cols[None, :], v, mask=live[:, None])
            note_lost(v, live, LOST + head * DV, cols, DV)
        if MEANS is not None:
            mean += tl.sum(v.to(tl.float32), 0)
        # coordinates off their mean, and what they add to both sums
        x = add_product(factor, k, tl.zeros([BR, BN], tl.float32), 3) - middle
        x = tl.where(live[None, :], x, 0.0)
        squares += x * x
        together = add_product(x, v, together, 2)
    # a group with NaN or Inf is kept, or its mean is lost: 0 * NaN must not spread it to all the others
    count = tl.maximum(size, 1).to(tl.float32)
    variance = tl.sum(squares, 1) / count
    variance = tl.where(tl.abs(variance) < float("inf"), variance, 0.0)
    together /= count
    together = tl.where(tl.abs(together) < float("inf"), together, 0.0)
    _store(COVARIANCE, VARIANCE, head * room + pid % C, together, variance, ranks, cols, R, DV)
    if MEANS is not None:
        tl.store(MEANS + pid * DV + cols, mean / count, mask=cols < DV)


def key_covariance(
    keys: Tensor,
    values: Tensor,
    kv: Partition,
    factor: Tensor,
    centroids: Tensor,
    value_dim: int,
    keep: tuple[Tensor, Tensor] | None = None,
    more: int = 0,
    means: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """keys and values [B, Hkv, N, padded] group-major, factor [B, Hkv, D, R], centroids [B, Hkv, Ck, D]
    -> covariance [B, Hkv, Ck, R, Dv] and variance [B, Hkv, Ck, R] of the keys' coordinates, finite; in bf16
    if the keys have 16 bits. Behind those of each head there is room for `more`. The means of the values are
    put into `means` [B, Hkv, Ck, Dv] fp32, if that is given.

    With `keep` the values are those of the call, in their original order: their rows are put into keep[0]
    [B, Hkv, N, padded] group-major, and channels that are not finite marked in keep[1] [B, Hkv, Dv] int32."""
    offsets = kv.offsets
    sorted_values, lost = keep if keep is not None else (None, None)
    value_width = values.shape[-1] if sorted_values is None else sorted_values.shape[-1]
    batch, heads, count, width = keys.shape
    groups, (dim, rank) = offsets.shape[-1] - 1, factor.shape[-2:]
    dtype = torch.float32 if keys.dtype == torch.float32 else torch.bfloat16
    covariance = torch.empty(batch, heads, groups + more, rank, value_dim, dtype=dtype, device=keys.device)
    variance = torch.empty(batch, heads, groups + more, rank, dtype=dtype, device=keys.device)
    if covariance.numel():
        parts = (factor.float().contiguous(), centroids.float().contiguous(), offsets.contiguous())
        tensors = (keys, values, kv.order.contiguous(), sorted_values, lost, *parts, covariance, variance, means)
        sizes = (heads, count, groups, rank, groups + more, values.stride())
        widest = max(width, value_width)
        blocks = {"D": dim, "DV": value_dim, "BD": width, "BDV": value_width, "BR": padded(rank)}
        key_covariance_kernel[(batch * heads * groups,)](
            *tensors,
            *sizes,
            **blocks,
            BN=32 if widest <= 128 else 16,
            num_warps=8 if widest > 128 and keys.dtype == torch.float32 else 4,
            num_stages=1 if width <= 64 and architecture() in FRUGAL_GPUS else 2,
        )
    return covariance, variance

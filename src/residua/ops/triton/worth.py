"""What a unit of mass counts in each K/V group, by how far its keys and its values are spread; and so what a
cell is worth."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from .shapes import padded


@triton.jit
def cell_worth(mass, base, bias, SHARES: tl.constexpr):
    """The worth of cells, bit for bit the same wherever it is asked for: nothing in it can be fused."""
    if not SHARES:
        mass = tl.where(mass == mass, mass, -float("inf"))
    worth = mass - base + bias
    return tl.where(worth == worth, worth, float("inf"))  # NaN comes first: it must reach the output


@triton.jit
def spread_kernel(
    K,  # [B, H, N, D] strided
    V,  # [B, H, N, DV] strided
    ORDER,  # [B, H, N] int64
    OFFSETS,  # [B, H, C + 1] int64
    SPREAD,  # [2, B, H, C] fp32: of keys and of values; not finite where it is not known
    H,
    N,
    C,
    every,
    kb,
    kh,
    kn,
    kd,
    vb,
    vh,
    vn,
    vd,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid // C
    K += head // H * kb + head % H * kh
    V += head // H * vb + head % H * vh
    ORDER += head * N
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BDV)
    start = tl.load(OFFSETS + pid + head).to(tl.int32)  # a row of offsets has C + 1 entries
    stop = tl.load(OFFSETS + pid + head + 1).to(tl.int32)
    start = (start + every - 1) // every * every
    key_sum = tl.zeros([BN], tl.float32)
    value_sum = tl.zeros([BN], tl.float32)
    pairs = tl.zeros([BN], tl.float32)
    for first in range(start, stop - every, every * BN):
        index = first + tl.arange(0, BN) * every
        live = index + every < stop
        here = tl.load(ORDER + index, mask=live, other=0)
        other = tl.load(ORDER + index + every, mask=live, other=0)
        mask = live[:, None] & (dims < D)[None, :]
        off = tl.load(K + here[:, None] * kn + dims[None, :] * kd, mask=mask, other=0.0).to(tl.float32)
        off -= tl.load(K + other[:, None] * kn + dims[None, :] * kd, mask=mask, other=0.0).to(tl.float32)
        key_sum += tl.sum(off * off, 1)
        mask = live[:, None] & (cols < DV)[None, :]
        off = tl.load(V + here[:, None] * vn + cols[None, :] * vd, mask=mask, other=0.0).to(tl.float32)
        off -= tl.load(V + other[:, None] * vn + cols[None, :] * vd, mask=mask, other=0.0).to(tl.float32)
        value_sum += tl.sum(off * off, 1)
        pairs += live.to(tl.float32)
    count = tl.sum(pairs, 0)  # 0 / 0 is not known
    tl.store(SPREAD + pid, tl.sum(key_sum, 0) / count)
    tl.store(SPREAD + tl.num_programs(0) + pid, tl.sum(value_sum, 0) / count)


@triton.jit
def relative_kernel(
    SPREAD,  # [2, B, H, C] fp32
    WORTH,  # [B, H, C] fp32
    C,
    least,
    BC: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * C
    SPREAD += head * C
    total_of_keys = tl.zeros([BC], tl.float32)
    total_of_values = tl.zeros([BC], tl.float32)
    keys_known = tl.zeros([BC], tl.float32)
    values_known = tl.zeros([BC], tl.float32)
    for first in range(0, C, BC):
        ids = first + tl.arange(0, BC)
        of_keys = tl.load(SPREAD + ids, mask=ids < C, other=float("inf"))
        of_values = tl.load(SPREAD + step + ids, mask=ids < C, other=float("inf"))
        total_of_keys += tl.where(of_keys < float("inf"), of_keys, 0.0)
        total_of_values += tl.where(of_values < float("inf"), of_values, 0.0)
        keys_known += (of_keys < float("inf")).to(tl.float32)
        values_known += (of_values < float("inf")).to(tl.float32)
    mean_of_keys = tl.sum(total_of_keys, 0) / tl.maximum(tl.sum(keys_known, 0), 1.0)
    mean_of_values = tl.sum(total_of_values, 0) / tl.maximum(tl.sum(values_known, 0), 1.0)
    for first in range(0, C, BC):
        ids = first + tl.arange(0, BC)
        of_keys = tl.load(SPREAD + ids, mask=ids < C, other=float("inf"))
        of_values = tl.load(SPREAD + step + ids, mask=ids < C, other=float("inf"))
        worth = _half_log(of_keys, mean_of_keys, least) + _half_log(of_values, mean_of_values, least)
        tl.store(WORTH + head * C + ids, worth, mask=ids < C)


@triton.jit
def _half_log(spread, mean, least):
    """Of the spread over the mean, at least `least`; 0 where it is not known, or no group has any."""
    relative = tl.where(spread < float("inf"), spread / tl.where(mean > 0.0, mean, 1.0), 1.0)
    relative = tl.where(mean > 0.0, relative, 1.0)
    return 0.5 * tl.log(tl.maximum(relative, least))


def group_worth(k: Tensor, v: Tensor, kv: Partition, every: int, least: float) -> Tensor:
    """k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, Hkv, Ck] fp32"""
    batch, heads, count, dim = k.shape
    value_dim, groups = v.shape[-1], kv.groups
    worth = torch.empty(batch, heads, groups, dtype=torch.float32, device=k.device)
    if not worth.numel():
        return worth
    spread = torch.empty(2, batch, heads, groups, dtype=torch.float32, device=k.device)
    spread_kernel[(batch * heads * groups,)](
        k, v, kv.order.contiguous(), kv.offsets.contiguous(), spread, heads, count, groups, every,
        *k.stride(), *v.stride(), D=dim, DV=value_dim, BN=8, BD=padded(dim), BDV=padded(value_dim),
        num_warps=2,
    )  # fmt: skip
    relative_kernel[(batch * heads,)](spread, worth, groups, least, BC=min(1024, padded(groups)), num_warps=4)
    return worth

"""The priority of K/V groups and of cells: what a unit of mass counts in a group, by how far its keys and values are
spread, and the log of a cell's mass per key weighted by it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Partition
from ..constants import MIN_SPREAD
from .device_functions import group_ends, head_start, load_rows
from .shapes import padded


@triton.jit
def cell_priority(mass, base, bias, NORMALISED: tl.constexpr):
    """The priority of cells, bit for bit the same wherever it is computed: nothing in it can be fused. `mass` is the
    log of the cells' mass, or of their share of it if NORMALISED, `base` that of the row, `bias` what a key counts."""
    if not NORMALISED:
        mass = tl.where(mass == mass, mass, -float("inf"))
    priority = mass - base + bias
    return tl.where(priority == priority, priority, float("inf"))  # NaN comes first: it must reach the output


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
    k_strides,
    v_strides,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
):
    """One program: one K/V group. SPREAD = mean squared distance between keys that are `every` places apart in the
    group's order, and the same for values: twice their variance."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid // C
    K = head_start(K, k_strides, head, H)
    V = head_start(V, v_strides, head, H)
    ORDER += head * N
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BDV)
    start, stop = group_ends(OFFSETS, pid, head)
    start = (start + every - 1) // every * every
    key_sum = tl.zeros([BN], tl.float32)
    value_sum = tl.zeros([BN], tl.float32)
    pairs = tl.zeros([BN], tl.float32)
    for first in range(start, stop - every, every * BN):
        index = first + tl.arange(0, BN) * every
        live = index + every < stop
        here = tl.load(ORDER + index, mask=live, other=0)
        other = tl.load(ORDER + index + every, mask=live, other=0)
        off = load_rows(K, k_strides, here, dims, live, D).to(tl.float32)
        off -= load_rows(K, k_strides, other, dims, live, D).to(tl.float32)
        key_sum += tl.sum(off * off, 1)
        off = load_rows(V, v_strides, here, cols, live, DV).to(tl.float32)
        off -= load_rows(V, v_strides, other, cols, live, DV).to(tl.float32)
        value_sum += tl.sum(off * off, 1)
        pairs += live.to(tl.float32)
    count = tl.sum(pairs, 0)  # 0 / 0 is not known
    tl.store(SPREAD + pid, tl.sum(key_sum, 0) / count)
    tl.store(SPREAD + tl.num_programs(0) + pid, tl.sum(value_sum, 0) / count)


@triton.jit
def relative_kernel(SPREAD, PRIORITY, C, minimum, BC: tl.constexpr):
    """One program: the K/V groups of one head. PRIORITY [B, H, C] = log of the root of their SPREAD [2, B, H, C]
    relative to the head's mean spreads, of keys plus of values."""
    head = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * C
    SPREAD += head * C
    # the head's mean spreads, over the groups where they are known
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
        priority = _half_log(of_keys, mean_of_keys, minimum) + _half_log(of_values, mean_of_values, minimum)
        tl.store(PRIORITY + head * C + ids, priority, mask=ids < C)


@triton.jit
def _half_log(spread, mean, minimum):
    """Half the log of spread / mean, which is at least `minimum`; 0 where it is not known, or no group has any."""
    relative = tl.where(spread < float("inf"), spread / tl.where(mean > 0.0, mean, 1.0), 1.0)
    relative = tl.where(mean > 0.0, relative, 1.0)
    return 0.5 * tl.log(tl.maximum(relative, minimum))


def group_priority(k: Tensor, v: Tensor, kv: Partition, every: int) -> Tensor:
    """k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, Hkv, Ck] fp32"""
    batch, heads, count, dim = k.shape
    value_dim, groups = v.shape[-1], kv.groups
    priority = torch.empty(batch, heads, groups, dtype=torch.float32, device=k.device)
    if not priority.numel():
        return priority
    spread = torch.empty(2, batch, heads, groups, dtype=torch.float32, device=k.device)
    tensors = (k, v, kv.order.contiguous(), kv.offsets.contiguous(), spread)
    sizes = (heads, count, groups, every, k.stride(), v.stride())
    blocks = {"D": dim, "DV": value_dim, "BN": 8, "BD": padded(dim), "BDV": padded(value_dim)}
    spread_kernel[(batch * heads * groups,)](*tensors, *sizes, **blocks, num_warps=2)
    relative_kernel[(batch * heads,)](spread, priority, groups, MIN_SPREAD, BC=min(1024, padded(groups)), num_warps=4)
    return priority

"""What a summary of skipped groups is made of, in plain torch (see `primitives/summary.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...types import Partition
from .chunks import chunk_rows
from .grouping import group_means


def choose_slots(
    log_mass: Tensor,
    cells: Tensor,
    query: Partition,
    kv: Partition,
    near: Tensor,
    single: int,
    merged: int,
    wanted: Tensor,
    matmul: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = kv.offsets.shape[1]
    shares = log_mass.shape[1] // kv_heads
    occupied = kv.sizes.repeat_interleave(shares, dim=1)[..., None, :] > 0
    skipped = ~cells & occupied & (query.sizes[..., None] > 0) & wanted[..., None, None]
    mass = torch.where(skipped, log_mass, -torch.inf)
    index = (near.repeat_interleave(shares, dim=1) + single)[..., None, :].expand_as(mass)
    # of equal masses the first: `topk` does not say which
    heaviest = mass.sort(dim=-1, descending=True, stable=True).indices[..., :single]  # [B, H, Cq, single]
    index = index.scatter(-1, heaviest, torch.arange(heaviest.shape[-1], device=mass.device).expand_as(heaviest))
    index = torch.where(skipped, index, single + merged)  # a spare last slot for what is kept

    top = mass.new_full((*mass.shape[:-1], single + merged + 1), -torch.inf)
    top = top.scatter_reduce(-1, index, mass, "amax")
    safe = torch.where(top.isinf(), 0.0, top)
    # sums by products with a one-hot matrix: torch's scatter_add_ adds in any order on a GPU
    shared = torch.where(skipped & (index >= single), (mass - safe.gather(-1, index)).exp(), 0.0)
    shared = shared.unflatten(1, (kv_heads, shares)).flatten(2, 3)  # [B, Hkv, shares * Cq, Ck]
    member = torch.nn.functional.one_hot(near, max(1, merged))[..., :merged].to(shared.dtype)
    total = matmul(shared, member).unflatten(2, (shares, -1)).flatten(1, 2)  # [B, H, Cq, merged]
    slot_mass = torch.cat([top[..., :single], total.log() + safe[..., single : single + merged]], -1)
    everything = slot_mass.logsumexp(-1, keepdim=True)
    share = torch.where(skipped, (mass - everything).exp(), 0.0)
    return torch.where(skipped, index, -1).to(torch.int32), slot_mass, share


def slot_means(
    anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, cq, dim = anchors.shape
    shares, count = heads // k.shape[1], log_mass.shape[-1]
    sums = torch.zeros(batch, heads, cq * (count + 1), dim + v.shape[-1], dtype=torch.float32, device=k.device)
    index = torch.where(slots < 0, count, slots).long()  # cells of no slot share a spare last one
    index = index + torch.arange(cq, device=k.device)[:, None] * (count + 1)  # [B, H, Cq, Ck]
    mass = torch.nn.functional.pad(log_mass, (0, 1), value=torch.inf).flatten(2)
    ends = kv.offsets.tolist()
    for b in range(batch):
        for h in range(heads):
            g = h // shares
            rows = torch.cat([k[b, g].float(), v[b, g].float()], -1)[kv.order[b, g]]  # group-major
            for c in range(kv.groups):
                part = rows[ends[b][g][c] : ends[b][g][c + 1]]
                at = index[b, h, :, c]
                logits = anchors[b, h].float() @ part[:, :dim].mT * scale - mass[b, h, at][:, None]
                # at most 0 but for rounding, which huge scores make large
                sums[b, h].index_add_(0, at, logits.clamp_(max=0.0).exp_() @ part)
    sums = sums.unflatten(2, (cq, count + 1))[..., :count, :]
    return sums[..., :dim].contiguous(), sums[..., dim:].contiguous()


def group_covariance(x: Tensor, v: Tensor, kv: Partition) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, rank = x.shape
    dim, sizes = v.shape[-1], kv.sizes.clamp(min=1)[..., None]
    means, value_means = group_means(x, kv), group_means(v, kv)
    covariance = torch.zeros(batch, heads, kv.groups + 1, rank * dim, dtype=torch.float32, device=x.device)
    variance = torch.zeros(batch, heads, kv.groups + 1, rank, dtype=torch.float32, device=x.device)
    index = kv.labels.remainder(kv.groups + 1)  # -1 becomes the spare last row
    step = chunk_rows(8 * rank * dim, tokens)
    for b in range(batch):
        for h in range(heads):
            for start in range(0, tokens, step):
                at = index[b, h, start : start + step]
                here = at.clamp(max=kv.groups - 1)
                off = x[b, h, start : start + step].float() - means[b, h, here]
                value_off = v[b, h, start : start + step].float() - value_means[b, h, here]
                covariance[b, h].index_add_(0, at, (off[:, :, None] * value_off[:, None]).flatten(1))
                variance[b, h].index_add_(0, at, off.square())
    covariance = (covariance[..., : kv.groups, :] / sizes).unflatten(-1, (rank, dim))
    return covariance, variance[..., : kv.groups, :] / sizes


def pooled_share(
    share: Tensor, kv: Partition, pool: Tensor, pools: int, matmul: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Shares of groups in which those of one pool divide the pool's share by their sizes.

    share [B, Hkv, M, Ck], pool [B, Hkv, Ck] int64 in range(pools) -> [B, Hkv, M, Ck]
    """
    # sums by products with a one-hot matrix: torch's scatter_add_ adds in any order on a GPU
    member = torch.nn.functional.one_hot(pool, pools).to(share.dtype)  # [B, Hkv, Ck, pools]
    sizes = kv.sizes.to(share.dtype)[..., None, :]
    part = sizes * member.mT  # [B, Hkv, pools, Ck]
    part = part / part.sum(-1, keepdim=True).clamp(min=1)
    return matmul(matmul(share, member), part)

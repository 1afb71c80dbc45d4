"""Routing in plain torch: the mass of cells, and spending a pair budget (see `primitives/routing.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...types import Partition
from .chunks import chunk_rows
from .grouping import count_labels, group_sums

MIN_SPREAD = 1e-4  # of a group, as a share of the mean over the groups of its head
FILL_PASSES = 4  # how often the rest of a budget is offered to the cells that were passed over


def cell_mass(anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
    batch, heads, cq, _ = anchors.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    shares = heads // kv_heads
    index = kv.labels.remainder(kv.groups + 1)  # padding goes to a spare last group
    mass = torch.empty(batch, kv_heads, shares * cq, kv.groups + 1, dtype=torch.float32, device=k.device)
    rows = anchors.unflatten(1, (kv_heads, shares)).flatten(2, 3) * scale  # [B, Hkv, shares * Cq, D]
    step = chunk_rows(12 * tokens, shares * cq)
    for b in range(batch):
        for g in range(kv_heads):
            keys = k[b, g].float()
            for start in range(0, shares * cq, step):
                logits = rows[b, g, start : start + step] @ keys.mT  # [step, Nk]
                mass[b, g, start : start + step] = _grouped_logsumexp(logits, index[b, g], kv.groups + 1)
    return mass[..., : kv.groups].reshape(batch, heads, cq, kv.groups)


def _grouped_logsumexp(logits: Tensor, index: Tensor, groups: int) -> Tensor:
    """logsumexp over the columns with the same index.  # [rows, Nk] -> [rows, groups]"""
    index = index.expand_as(logits)
    top = logits.new_full((logits.shape[0], groups), -torch.inf)
    top.scatter_reduce_(1, index, logits, "amax")
    safe = torch.where(top.isinf(), 0.0, top)
    sums = torch.zeros_like(top).scatter_add_(1, index, (logits - safe.gather(1, index)).exp_())
    return sums.log_().add_(safe)


def spend(log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
    pairs = query_sizes[..., :, None] * kv_sizes[..., None, :]  # [B, H, Cq, Ck] int64
    value = log_share - kv_sizes.clamp(min=1).float().log()[..., None, :]
    value = torch.where(value.isnan(), torch.inf, value)
    value = torch.where(pairs > 0, value, -torch.inf)

    best = value.argmax(-1, keepdim=True)
    kept = torch.zeros_like(pairs, dtype=torch.bool).scatter_(-1, best, pairs.gather(-1, best) > 0)

    order = value.flatten(-2).argsort(dim=-1, descending=True, stable=True)  # [B, H, Cq * Ck]
    cost = pairs.flatten(-2).gather(-1, order)
    taken = kept.flatten(-2).gather(-1, order)
    left = budget - (cost * taken).sum(-1)
    for _ in range(FILL_PASSES):
        # a cell that does not fit is passed over, so that one huge cell does not end the spending
        fits = ~taken & (cost > 0) & (cost <= left[..., None])
        fits &= torch.where(fits, cost, 0).cumsum(-1) <= left[..., None]
        taken |= fits
        left = left - (cost * fits).sum(-1)
    return torch.zeros_like(taken).scatter_(-1, order, taken).view_as(kept)


def group_worth(
    k: Tensor, v: Tensor, kv: Partition, every: int, gather_rows: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    index = kv.order[..., ::every]  # [B, Hkv, S]
    label = kv.labels.gather(-1, index)
    # half the squared distance of two keys of a group is its variance, on average
    same = label[..., 1:] == label[..., :-1]
    pair = torch.where(same, label[..., 1:], -1)
    count = count_labels(pair, kv.groups)  # [B, Hkv, Ck]
    worth = torch.zeros(kv.sizes.shape, dtype=torch.float32, device=k.device)
    for x in (k, v):
        apart = gather_rows(x, index).float().diff(dim=2).square().sum(-1, keepdim=True)  # [B, Hkv, S - 1, 1]
        spread = group_sums(apart, pair, count)[..., 0] / count  # NaN where there is no pair
        spread = torch.where(spread.isinf(), torch.nan, spread)
        relative = spread / spread.nanmean(-1, keepdim=True)  # NaN if unknown, or if no group has any
        worth += 0.5 * torch.nan_to_num(relative, nan=1.0).clamp(min=MIN_SPREAD).log()
    return worth

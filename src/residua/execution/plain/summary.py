"""What a summary of skipped groups is made of, in plain torch. The contracts stand in `Backend`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import Partition
from .chunks import chunk_rows
from .grouping import group_means


def slot_means(
    anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, cq, dim = anchors.shape
    shares, count = heads // k.shape[1], log_mass.shape[-1]
    sums = torch.zeros(
        batch, heads, cq * (count + 1), dim + v.shape[-1], dtype=torch.float32, device=k.device
    )
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

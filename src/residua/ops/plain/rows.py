"""Single query rows in plain torch: which ones are central, and their exact attention (see
`primitives/rows.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import Partition
from .chunks import chunk_rows
from .grouping import count_labels, gather_rows, group_sums


def central_rows(x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
    counts = count_labels(labels, groups)
    means = group_sums(x, labels, counts) / counts.clamp(min=1)[..., None]
    distance = (x - gather_rows(means, labels.clamp(min=0))).norm(dim=-1)  # [B, H, N]

    bins = torch.where(labels < 0, groups, labels)
    by_distance = distance.argsort(dim=-1, stable=True)
    by_group = bins.gather(-1, by_distance).argsort(dim=-1, stable=True)
    order = by_distance.gather(-1, by_group)  # group by group, nearest first
    first = torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
    place = torch.arange(labels.shape[-1], device=labels.device).expand_as(labels)
    rank = torch.empty_like(labels).scatter_(-1, order, place) - first.gather(-1, bins)
    turn = torch.where(labels >= 0, rank * groups + labels, torch.iinfo(torch.long).max)
    return turn.topk(count, dim=-1, largest=False, sorted=True).indices


def row_peaks(x: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, dim = x.shape
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    peaks = torch.empty(batch, heads, tokens, dtype=working, device=x.device)
    finite = torch.empty(batch, heads, tokens, dtype=torch.bool, device=x.device)
    step = chunk_rows(12 * batch * heads * dim, tokens)
    for start in range(0, tokens, step):
        part = x[:, :, start : start + step]
        good = torch.isfinite(part)
        finite[:, :, start : start + step] = good.all(-1)
        peaks[:, :, start : start + step] = torch.where(good, part.abs(), 0.0).amax(-1)
    return peaks, finite


def attend_rows(rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, count, _ = rows.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    working = torch.float64 if rows.dtype == torch.float64 else torch.float32
    shared = rows.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)  # [B, Hkv, shares * M, D]
    out = rows.new_zeros(*shared.shape[:3], v.shape[-1], dtype=working)
    step = chunk_rows(8 * tokens, shared.shape[2])
    for b in range(batch):
        hidden = None if key_mask is None else ~key_mask[b]
        for g in range(kv_heads):
            keys, values = k[b, g].to(working), v[b, g].to(working)
            if hidden is not None:
                values = torch.where(hidden[:, None], 0.0, values)  # 0 * NaN must not reach the output
            for start in range(0, shared.shape[2], step):
                logits = shared[b, g, start : start + step].to(working) @ keys.mT * scale  # [step, Nk]
                if hidden is not None:
                    logits.masked_fill_(hidden, -torch.inf)
                weights = logits.softmax(-1)
                if hidden is not None:  # without any key: zeros, not NaN; -inf from a key that is seen stays NaN
                    weights = torch.where(hidden.all(), 0.0, weights)
                out[b, g, start : start + step] = weights @ values
    return out.reshape(batch, heads, count, v.shape[-1])


def split_rows(
    rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, count, _ = rows.shape
    shares, tokens = heads // k.shape[1], k.shape[2]
    exact = attend_rows(rows, k, v, key_mask, scale)
    part = torch.zeros_like(exact)
    lse = exact.new_empty(batch, heads, count)
    groups = torch.nn.functional.pad(kept, (0, 1))  # label -1, padding, is the last: never kept
    step = chunk_rows(8 * tokens, count)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // shares].to(exact.dtype), v[b, h // shares].to(exact.dtype)
            for start in range(0, count, step):
                at = slice(start, start + step)
                seen = groups[b, h, at][:, kv.labels[b, h // shares]]  # [step, Nk]
                logits = rows[b, h, at].to(exact.dtype) @ keys.mT * scale
                logits.masked_fill_(~seen, -torch.inf)
                # what no row keeps must not reach it as 0 * NaN
                weights = torch.where(seen.any(-1, keepdim=True), logits.softmax(-1), 0.0)
                part[b, h, at] = weights @ torch.where(seen.any(0)[:, None], values, 0.0)
                lse[b, h, at] = logits.logsumexp(-1)
    return exact, part, lse

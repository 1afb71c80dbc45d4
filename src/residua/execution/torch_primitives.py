"""Every primitive of a call in plain torch: any device, bounded memory. The base of all backends.

Work is cut into chunks so that a temporary never exceeds about `CHUNK_BYTES`, whatever N is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Partition

CHUNK_BYTES = 64 << 20
RMS_FLOOR = 1e-6


def _chunk(row_bytes: int, total: int) -> int:
    return max(1, min(total, CHUNK_BYTES // max(1, row_bytes)))


def project(x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
    out = torch.matmul(x.float(), factor)  # [B, H, N, R]
    if normalise:
        rms = out.square().mean(-1, keepdim=True).sqrt_().clamp_(min=RMS_FLOOR)
        out /= rms
    return out


def assign(x: Tensor, centres: Tensor) -> Tensor:
    """Index of the nearest centre of every row; ties and NaN never leave the range.  # [G, N]"""
    groups, rows, _ = x.shape
    half_norm = centres.square().sum(-1)[:, None].mul(0.5)  # [G, 1, C]
    labels = torch.empty(groups, rows, dtype=torch.long, device=x.device)
    step = _chunk(4 * groups * centres.shape[1], rows)
    for start in range(0, rows, step):
        part = x[:, start : start + step]
        # |x|^2 is the same for every centre, so the nearest centre has the least |c|^2 / 2 - x.c
        torch.argmin(
            torch.baddbmm(half_norm, part, centres.mT, alpha=-1), -1, out=labels[:, start : start + step]
        )
    return labels


def kmeans_step(x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    labels = assign(x, centres)
    if valid is not None:
        labels = torch.where(valid, labels, -1)
    groups = centres.shape[1]
    sizes = count_labels(labels, groups)
    means = group_sums(x[None], labels[None], sizes[None])[0] / sizes.clamp(min=1)[..., None]
    return labels, torch.where(sizes[..., None] > 0, means, centres), sizes


def count_labels(labels: Tensor, groups: int) -> Tensor:
    """How many tokens carry each label; negative labels are not counted.  # [..., N] -> [..., groups]"""
    counts = torch.zeros(*labels.shape[:-1], groups, dtype=torch.long, device=labels.device)
    return counts.scatter_add_(-1, labels.clamp(min=0), (labels >= 0).long())


def gather_rows(x: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(x, order[..., None], dim=-2)


def group_means(x: Tensor, partition: Partition) -> Tensor:
    sizes = partition.sizes  # [B, H, C]
    return group_sums(x, partition.labels, sizes) / sizes.clamp(min=1)[..., None]


def group_sums(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Sums of the rows of each group, always added in the same order.

    x [B, H, N, D], labels [B, H, N], sizes [B, H, C] -> [B, H, C, D] fp32
    """
    batch, heads, _, dim = x.shape
    groups = sizes.shape[-1]
    if x.device.type == "cpu":
        sums = torch.zeros(batch, heads, groups + 1, dim)
        index = labels.remainder(groups + 1)  # -1 becomes the spare last row
        for b in range(batch):
            for h in range(heads):
                sums[b, h].index_add_(0, index[b, h], x[b, h].float())
        return sums[..., :groups, :]
    # on a GPU index_add_ adds in any order; sorted segments do not
    order = torch.where(labels < 0, groups, labels).argsort(dim=-1, stable=True)
    rest = labels.shape[-1] - sizes.sum(-1, keepdim=True)
    lengths = torch.cat([sizes, rest], -1).flatten()
    sums = torch.segment_reduce(
        gather_rows(x, order).float().flatten(0, 2), "sum", lengths=lengths, unsafe=True
    )
    return sums.view(batch, heads, groups + 1, dim)[..., :groups, :]


def cell_mass(anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
    batch, heads, cq, _ = anchors.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    shares = heads // kv_heads
    index = kv.labels.remainder(kv.groups + 1)  # padding goes to a spare last group
    mass = torch.empty(batch, kv_heads, shares * cq, kv.groups + 1, device=k.device)
    rows = anchors.unflatten(1, (kv_heads, shares)).flatten(2, 3) * scale  # [B, Hkv, shares * Cq, D]
    step = _chunk(12 * tokens, shares * cq)
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


def attend_rows(rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, count, _ = rows.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    working = torch.float64 if rows.dtype == torch.float64 else torch.float32
    shared = rows.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)  # [B, Hkv, shares * M, D]
    out = rows.new_zeros(*shared.shape[:3], v.shape[-1], dtype=working)
    step = _chunk(8 * tokens, shared.shape[2])
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
                out[b, g, start : start + step] = _softmax(logits) @ values
    return out.reshape(batch, heads, count, v.shape[-1])


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; a row without any key gives zeros instead of NaN."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, logits.softmax(-1))


def add_affine(out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    result = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
    step = _chunk(12 * out.shape[-1] * out.shape[0] * out.shape[1], out.shape[2])
    for start in range(0, out.shape[2], step):
        part = out[:, :, start : start + step]
        result[:, :, start : start + step] = part + (part @ left @ right + bias[..., None, :])
    return result

"""Grouping in plain torch: projections, k-means steps, means and moments (see `primitives/grouping.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import Partition
from .chunks import chunk_rows

RMS_FLOOR = 1e-6


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
    step = chunk_rows(4 * groups * centres.shape[1], rows)
    for start in range(0, rows, step):
        part = x[:, start : start + step]
        # |x|^2 is the same for every centre, so the nearest centre has the least |c|^2 / 2 - x.c
        torch.argmin(torch.baddbmm(half_norm, part, centres.mT, alpha=-1), -1, out=labels[:, start : start + step])
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
    # take_along_dim would copy the expanded index
    return x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))


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
        sums = torch.zeros(batch, heads, groups + 1, dim, dtype=torch.float32, device=x.device)
        index = labels.remainder(groups + 1)  # -1 becomes the spare last row
        for b in range(batch):
            for h in range(heads):
                sums[b, h].index_add_(0, index[b, h], x[b, h].float())
        return sums[..., :groups, :]
    # on a GPU index_add_ adds in any order; sorted segments do not
    order = torch.where(labels < 0, groups, labels).argsort(dim=-1, stable=True)
    rest = labels.shape[-1] - sizes.sum(-1, keepdim=True)
    lengths = torch.cat([sizes, rest], -1).flatten()
    sums = torch.segment_reduce(gather_rows(x, order).float().flatten(0, 2), "sum", lengths=lengths, unsafe=True)
    return sums.view(batch, heads, groups + 1, dim)[..., :groups, :]


def second_moment(x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
    x = x.double()
    taken = torch.isfinite(x).all(-1, keepdim=True)  # [..., M, 1]
    if counted is not None:
        taken &= counted[..., None]
    count = taken.sum(-2, keepdim=True).clamp(min=1)
    x = torch.where(taken, x, 0.0)
    if centred:
        x = torch.where(taken, x - x.sum(-2, keepdim=True) / count, 0.0)
    return x.mT @ x / count


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    # the largest entry is scaled to 1: no overflow in the solver
    size = matrix.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    values, vectors = torch.linalg.eigh(matrix / size)
    return values * size[..., 0], vectors

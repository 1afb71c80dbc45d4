"""Tokens sorted into groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Partition
from .constants import MIN_RMS
from .device import chunk_rows, on_cpu
from .matrices import MatrixPrimitives


class GroupingPrimitives(MatrixPrimitives):
    """Tokens sorted into groups."""

    def project(self, x: Tensor, factor: Tensor, normalise: bool, rough: bool = False) -> Tensor:
        """Response coordinates `x @ factor`.

        Args:
            x: [B, H, N, D].
            factor: [B, H, D, R] fp32.
            normalise: Whether each row is divided by its RMS.
            rough: Whether rows are only grouped by it: then a backend may round to 16 bits, and take what is
                not finite as 0.

        Returns:
            [B, H, N, R] fp32, or another dtype where it is rough.
        """
        out = torch.matmul(x.float(), factor)  # [B, H, N, R]
        if normalise:
            rms = out.square().mean(-1, keepdim=True).sqrt_().clamp_(min=MIN_RMS)
            out /= rms
        return out

    def lloyd(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None, means: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Lloyd steps one after the other: nearest centre of every row (ties: the lowest index), then the
        mean of every group. What is not finite counts as 0.

        Args:
            x: [G, N, R] fp32.
            centres: [G, C, R] fp32.
            steps: How many, at least one; fewer where nothing changes any more.
            valid: [G, N] bool, rows that count; None: all.
            means: Whether the centres and sizes are wanted; if not, they may hold anything.

        Returns:
            Labels [G, N] int64 (-1 where not valid), centres [G, C, R] (an empty group keeps its own), and
            sizes [G, C] int64.
        """
        x, centres = self._only_finite(x), self._only_finite(centres)
        for _ in range(steps):
            before = centres
            labels, centres, sizes = self._lloyd_step(x, centres, valid)
            if on_cpu(x) and torch.equal(before, centres):  # further steps change nothing
                break
        return labels, centres, sizes

    def sort_groups(self, labels: Tensor, groups: int) -> Partition:
        """Sorts tokens by label, stably.

        Args:
            labels: [B, H, N] int64, -1 for a token of no group.
            groups: How many groups there are.

        Returns:
            What `Partition.from_labels` returns.
        """
        return Partition.from_labels(labels, groups)

    def gather_rows(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows in another order.

        Args:
            x: [B, H, N, D].
            order: [B, H, M] int64, token indices.

        Returns:
            [B, H, M, D], contiguous.
        """
        return take_rows(x, order)

    def group_means(self, x: Tensor, partition: Partition, keep: bool = False) -> Tensor:
        """The mean of each group's rows.

        Args:
            x: [B, H, N, D].
            partition: The groups.
            keep: Whether the call wants the rows in the order of their groups later: a session may keep them.

        Returns:
            [B, H, C, D] fp32, zeros for an empty group.
        """
        return label_means(x, partition.labels, partition.sizes)

    def central_rows(self, x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
        """Visits the groups in turn and takes from each the row nearest to the group's mean that is not taken
        yet (ties: the lower index; NaN last). Rows of no group fill up what is left.

        Args:
            x: [B, H, N, R] fp32.
            labels: [B, H, N], the group of every row, or -1.
            groups: How many groups there are.
            count: How many rows to take, at most N.

        Returns:
            [B, H, count] int64.
        """
        counts = count_labels(labels, groups)
        means = label_means(x, labels, counts)
        distance = (x - take_rows(means, labels.clamp(min=0))).norm(dim=-1)  # [B, H, N]

        bins = torch.where(labels < 0, groups, labels)
        by_distance = distance.argsort(dim=-1, stable=True)
        by_group = bins.gather(-1, by_distance).argsort(dim=-1, stable=True)
        order = by_distance.gather(-1, by_group)  # group by group, nearest first
        first = torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
        place = torch.arange(labels.shape[-1], device=labels.device).expand_as(labels)
        rank = torch.empty_like(labels).scatter_(-1, order, place) - first.gather(-1, bins)
        turn = torch.where(labels >= 0, rank * groups + labels, torch.iinfo(torch.long).max)
        return turn.topk(count, dim=-1, largest=False, sorted=True).indices

    def _lloyd_step(self, x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        labels = nearest(x, centres)
        if valid is not None:
            labels = torch.where(valid, labels, -1)
        sizes = count_labels(labels, centres.shape[1])
        means = label_means(x[None], labels[None], sizes[None])[0]
        return labels, torch.where(sizes[..., None] > 0, means, centres), sizes


def nearest(x: Tensor, centres: Tensor) -> Tensor:
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


def take_rows(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, N, D] in the order [B, H, M]; take_along_dim would copy the expanded index.  # [B, H, M, D]"""
    return x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))


def count_labels(labels: Tensor, groups: int) -> Tensor:
    """How many tokens carry each label; negative labels are not counted.  # [..., N] -> [..., groups]"""
    counts = torch.zeros(*labels.shape[:-1], groups, dtype=torch.long, device=labels.device)
    return counts.scatter_add_(-1, labels.clamp(min=0), (labels >= 0).long())


def group_sums(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Sums of the rows of each group, always added in the same order.

    x [B, H, N, D], labels [B, H, N], sizes [B, H, C] -> [B, H, C, D] fp32
    """
    batch, heads, _, dim = x.shape
    groups = sizes.shape[-1]
    if on_cpu(x):
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
    sums = torch.segment_reduce(take_rows(x, order).float().flatten(0, 2), "sum", lengths=lengths, unsafe=True)
    return sums.view(batch, heads, groups + 1, dim)[..., :groups, :]


def label_means(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """The means that belong to `group_sums`; 0 for an empty group."""
    return group_sums(x, labels, sizes) / sizes.clamp(min=1)[..., None]

"""Tokens sorted into groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import Partition
from .. import plain
from .numbers import NumberPrimitives


class GroupingPrimitives(NumberPrimitives):
    """Tokens sorted into groups."""

    def project(self, x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
        """Response coordinates `x @ factor`, each row divided by its RMS if `normalise`.

        x [B, H, N, D], factor [B, H, D, R] fp32 -> [B, H, N, R] fp32
        """
        return plain.project(x, factor, normalise)

    def coordinates(self, x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
        """`project` for rows that are only grouped by it: a backend may round to 16 bits, and take what is
        not finite as 0.  # [B, H, N, R]"""
        return self.project(x, factor, normalise)

    def kmeans_step(self, x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """One Lloyd step: nearest centre of every row (ties: the lowest index), then the mean of every group.

        x [G, N, R] fp32, centres [G, C, R] fp32, valid [G, N] bool or None
        -> labels [G, N] int64 (-1 where not valid), centres [G, C, R] (an empty group keeps its own),
           sizes [G, C] int64
        """
        return plain.kmeans_step(x, centres, valid)

    def lloyd(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`steps` Lloyd steps, at least one; what is not finite counts as 0. Arguments and results are those
        of `kmeans_step`."""
        x, centres = self.only_finite(x), self.only_finite(centres)
        for _ in range(steps):
            before = centres
            labels, centres, sizes = self.kmeans_step(x, centres, valid)
            # further steps change nothing; a GPU is not asked, because it would have to wait
            if x.device.type == "cpu" and torch.equal(before, centres):
                break
        return labels, centres, sizes

    def lloyd_labels(self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None) -> Tensor:
        """The labels that `lloyd` ends with.  # [G, N] int64"""
        return self.lloyd(x, centres, steps, valid)[0]

    def sort_groups(self, labels: Tensor, groups: int) -> Partition:
        """Sorts tokens by label, stably: `Partition.from_labels`."""
        return Partition.from_labels(labels, groups)

    def gather_rows(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of x [B, H, N, D] in the order [B, H, M] of token indices -> contiguous [B, H, M, D]."""
        return plain.gather_rows(x, order)

    def group_means(self, x: Tensor, partition: Partition) -> Tensor:
        """Mean of each group's rows, zeros for an empty group.  # [B, H, N, D] -> [B, H, C, D] fp32"""
        return plain.group_means(x, partition)

    def sorted_means(self, x: Tensor, partition: Partition) -> Tensor:
        """`group_means` of rows that will be wanted in the order of their groups: a backend may keep them."""
        return self.group_means(x, partition)

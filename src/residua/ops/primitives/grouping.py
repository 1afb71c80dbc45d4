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
        """Response coordinates `x @ factor`.

        Args:
            x: [B, H, N, D].
            factor: [B, H, D, R] fp32.
            normalise: Whether each row is divided by its RMS.

        Returns:
            [B, H, N, R] fp32.
        """
        return plain.project(x, factor, normalise)

    def coordinates(self, x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
        """`project` for rows that are only grouped by it: a backend may round to 16 bits, and take what is
        not finite as 0.

        Args:
            x: As in `project`.
            factor: As in `project`.
            normalise: As in `project`.

        Returns:
            [B, H, N, R].
        """
        return self.project(x, factor, normalise)

    def kmeans_step(self, x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """One Lloyd step: nearest centre of every row (ties: the lowest index), then the mean of every group.

        Args:
            x: [G, N, R] fp32.
            centres: [G, C, R] fp32.
            valid: [G, N] bool, rows that count; None: all.

        Returns:
            Labels [G, N] int64 (-1 where not valid), centres [G, C, R] (an empty group keeps its own), and
            sizes [G, C] int64.
        """
        return plain.kmeans_step(x, centres, valid)

    def lloyd(self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Lloyd steps one after the other; what is not finite counts as 0.

        Args:
            x: As in `kmeans_step`.
            centres: As in `kmeans_step`.
            steps: How many, at least one; fewer where nothing changes any more.
            valid: As in `kmeans_step`.

        Returns:
            As `kmeans_step`.
        """
        x, centres = self.only_finite(x), self.only_finite(centres)
        for _ in range(steps):
            before = centres
            labels, centres, sizes = self.kmeans_step(x, centres, valid)
            # further steps change nothing; a GPU is not asked, because it would have to wait
            if x.device.type == "cpu" and torch.equal(before, centres):
                break
        return labels, centres, sizes

    def lloyd_labels(self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None) -> Tensor:
        """The labels that `lloyd` ends with.

        Args:
            x: As in `kmeans_step`.
            centres: As in `kmeans_step`.
            steps: As in `lloyd`.
            valid: As in `kmeans_step`.

        Returns:
            [G, N] int64.
        """
        return self.lloyd(x, centres, steps, valid)[0]

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
        return plain.gather_rows(x, order)

    def group_means(self, x: Tensor, partition: Partition) -> Tensor:
        """The mean of each group's rows.

        Args:
            x: [B, H, N, D].
            partition: The groups.

        Returns:
            [B, H, C, D] fp32, zeros for an empty group.
        """
        return plain.group_means(x, partition)

    def sorted_means(self, x: Tensor, partition: Partition) -> Tensor:
        """`group_means` of rows that will be wanted in the order of their groups: a backend may keep them.

        Args:
            x: As in `group_means`.
            partition: As in `group_means`.

        Returns:
            As `group_means`.
        """
        return self.group_means(x, partition)

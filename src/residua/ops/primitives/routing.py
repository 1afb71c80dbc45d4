"""What a cell weighs, and which cells a budget buys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...types import Partition
from .. import plain
from .grouping import GroupingPrimitives


class RoutingPrimitives(GroupingPrimitives):
    """What a cell weighs, and which cells a budget buys."""

    def cell_mass(self, anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
        """Log of the attention mass of every K/V group at every anchor: logsumexp over the group's keys.

        Args:
            anchors: [B, H, Cq, D] fp32.
            k: [B, Hkv, Nk, D].
            kv: Groups of the keys.
            scale: Factor of the scores.

        Returns:
            [B, H, Cq, Ck] fp32, -inf for an empty group.
        """
        return plain.cell_mass(anchors, k, kv, scale)

    def spend(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
        """Keeps the cells with the most mass per pair, over all cells of a head at once, within the budget.

        Every non-empty query group keeps its best cell even if the budget does not cover it. Equal scores go
        to the lower index. A score that is NaN comes first: what is wrong must reach the output.

        Args:
            log_share: [B, H, Cq, Ck], log of the share of a row's mass.
            query_sizes: [B, H, Cq] int64.
            kv_sizes: [B, H, Ck] int64.
            budget: [B, H] int64, in pairs.

        Returns:
            The kept cells [B, H, Cq, Ck] bool.
        """
        return plain.spend(log_share, query_sizes, kv_sizes, budget)

    def spend_each(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor]) -> Tensor:
        """`spend` for several budgets over the same cells.

        Args:
            log_share: As in `spend`.
            query_sizes: As in `spend`.
            kv_sizes: As in `spend`.
            budgets: [B, H] int64 each.

        Returns:
            [budgets, B, H, Cq, Ck] bool.
        """
        return torch.stack([self.spend(log_share, query_sizes, kv_sizes, budget) for budget in budgets])

    def best_cells(
        self,
        log_mass: Tensor,
        query_sizes: Tensor,
        kv_sizes: Tensor,
        budgets: Sequence[Tensor],
        free: int,
        worth: Tensor | None = None,
        weighed: int | None = None,
    ) -> Tensor:
        """`spend_each` on the first `free` K/V groups, by the share of a row's mass over all of them: what is
        pinned is paid for already, and its mass is the row's own. Groups of NaN are kept whatever they
        cost.

        Args:
            log_mass: [B, H, Cq, Ck] as from `cell_scores`.
            query_sizes: [B, H, Cq] int64.
            kv_sizes: [B, H, Ck] int64.
            budgets: [B, H] int64 each.
            free: K/V groups that are not pinned; these come first.
            worth: [B, H, Ck] fp32, log of what a unit of mass in a K/V group counts; None: the same
                everywhere.
            weighed: For how many of the budgets, the first ones, `worth` counts; None: for all.

        Returns:
            [budgets, B, H, Cq, free] bool.
        """
        broken = log_mass.isnan()
        log_share = torch.where(broken, -torch.inf, log_mass).log_softmax(-1)[..., :free]
        kv_sizes = kv_sizes[..., :free]
        rankings = [(log_share, budgets)]
        if worth is not None:
            by_worth = log_share + worth[..., None, :free]
            rankings = [(by_worth, budgets[:weighed])]
            if weighed is not None and weighed < len(budgets):
                rankings.append((log_share, budgets[weighed:]))
        found = torch.cat([self.spend_each(x, query_sizes, kv_sizes, each) for x, each in rankings])
        occupied = (query_sizes[..., None] > 0) & (kv_sizes[..., None, :] > 0)
        return found | (broken[..., :free] & occupied)

    def group_worth(self, k: Tensor, v: Tensor, kv: Partition, every: int) -> Tensor:
        """Log of what a unit of mass in a K/V group counts: spread of the keys x spread of the values,
        relative to the other groups of the head; 0 where it is not known.

        Args:
            k: [B, Hkv, N, D].
            v: [B, Hkv, N, Dv].
            kv: Groups of the keys.
            every: One in how many keys is looked at, in the order of the groups.

        Returns:
            [B, Hkv, Ck] fp32.
        """
        return plain.group_worth(k, v, kv, every, self.gather_rows)

    def missed_mass(self, log_mass: Tensor, cells: Tensor) -> Tensor:
        """Share of each query group's mass in the cells that are not kept; groups of NaN count as nothing.

        Args:
            log_mass: [B, H, Cq, Ck].
            cells: [n, B, H, Cq, Ck] bool, n choices of kept cells.

        Returns:
            [n, B, H, Cq] fp32.
        """
        mass = torch.where(log_mass.isnan(), -torch.inf, log_mass)
        share = torch.where(mass == -torch.inf, 0.0, mass.softmax(-1))  # a row without any mass misses none
        return torch.where(cells, 0.0, share).sum(-1)

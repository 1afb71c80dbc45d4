"""What a cell weighs, and which cells a budget buys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import Partition
from .constants import FILL_PASSES, MIN_SPREAD
from .device import chunk_rows
from .grouping import GroupingPrimitives, count_labels, group_sums


class CellPrimitives(GroupingPrimitives):
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
        batch, heads, cq, _ = anchors.shape
        kv_heads, tokens = k.shape[1], k.shape[2]
        heads_per_kv = heads // kv_heads
        index = kv.labels.remainder(kv.groups + 1)  # padding goes to a spare last group
        mass = torch.empty(batch, kv_heads, heads_per_kv * cq, kv.groups + 1, dtype=torch.float32, device=k.device)
        rows = anchors.unflatten(1, (kv_heads, heads_per_kv)).flatten(2, 3) * scale  # [B, Hkv, rows, D]
        step = chunk_rows(12 * tokens, heads_per_kv * cq)
        for b in range(batch):
            for g in range(kv_heads):
                keys = k[b, g].float()
                for start in range(0, heads_per_kv * cq, step):
                    logits = rows[b, g, start : start + step] @ keys.mT  # [step, Nk]
                    mass[b, g, start : start + step] = _grouped_logsumexp(logits, index[b, g], kv.groups + 1)
        return mass[..., : kv.groups].reshape(batch, heads, cq, kv.groups)

    def best_cells(
        self,
        log_mass: Tensor,
        query_sizes: Tensor,
        kv_sizes: Tensor,
        budgets: Sequence[Tensor],
        free: int | None = None,
        priority: Tensor | None = None,
        weighed: int | None = None,
        shares: bool = False,
    ) -> Tensor:
        """Keeps the cells with the most mass per pair, over all cells of a head at once, within each budget.

        Every non-empty query group keeps its best cell even if the budget does not cover it. Equal scores go
        to the lower index. The mass is taken as a share of a row's mass over all groups: what is pinned is
        paid for already, and its mass is the row's own. Groups of NaN are kept whatever they cost.

        Args:
            log_mass: [B, H, Cq, Ck] as from `cell_scores`.
            query_sizes: [B, H, Cq] int64.
            kv_sizes: [B, H, Ck] int64.
            budgets: [B, H] int64 each, in pairs.
            free: K/V groups that are not pinned; these come first. None: all.
            priority: [B, H, Ck] fp32, log of what a unit of mass in a K/V group counts; None: the same
                everywhere.
            weighed: For how many of the budgets, the first ones, `priority` counts; None: for all.
            shares: Whether log_mass holds shares already, none of them pinned. They are taken as they are; NaN
                comes first, within the budget: what is wrong must reach the output.

        Returns:
            [budgets, B, H, Cq, free] bool.
        """
        if shares:
            return self._spend(log_mass, query_sizes, kv_sizes, budgets)
        broken = log_mass.isnan()
        log_share = torch.where(broken, -torch.inf, log_mass).log_softmax(-1)[..., :free]
        kv_sizes = kv_sizes[..., :free]
        rankings = [(log_share, budgets)]
        if priority is not None:
            rankings = [(log_share + priority[..., None, :free], budgets[:weighed])]
            if weighed is not None and weighed < len(budgets):
                rankings.append((log_share, budgets[weighed:]))
        found = torch.cat([self._spend(x, query_sizes, kv_sizes, each) for x, each in rankings])
        occupied = (query_sizes[..., None] > 0) & (kv_sizes[..., None, :] > 0)
        return found | (broken[..., :free] & occupied)

    def group_priority(self, k: Tensor, v: Tensor, kv: Partition, every: int) -> Tensor:
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
        index = kv.order[..., ::every]  # [B, Hkv, S]
        label = kv.labels.gather(-1, index)
        # half the squared distance of two keys of a group is its variance, on average
        same = label[..., 1:] == label[..., :-1]
        pair = torch.where(same, label[..., 1:], -1)
        count = count_labels(pair, kv.groups)  # [B, Hkv, Ck]
        priority = torch.zeros(kv.sizes.shape, dtype=torch.float32, device=k.device)
        for x in (k, v):
            apart = self.gather_rows(x, index).float().diff(dim=2).square().sum(-1, keepdim=True)  # [B, Hkv, S - 1, 1]
            spread = group_sums(apart, pair, count)[..., 0] / count  # NaN where there is no pair
            spread = torch.where(spread.isinf(), torch.nan, spread)
            relative = spread / spread.nanmean(-1, keepdim=True)  # NaN if unknown, or if no group has any
            priority += 0.5 * torch.nan_to_num(relative, nan=1.0).clamp(min=MIN_SPREAD).log()
        return priority

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

    def _spend(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor]) -> Tensor:
        """`best_cells` of shares.  # [budgets, B, H, Cq, Ck] bool"""
        pairs = query_sizes[..., :, None] * kv_sizes[..., None, :]  # [B, H, Cq, Ck] int64
        value = log_share - kv_sizes.clamp(min=1).float().log()[..., None, :]
        value = torch.where(value.isnan(), torch.inf, value)
        value = torch.where(pairs > 0, value, -torch.inf)
        best = value.argmax(-1, keepdim=True)
        kept = torch.zeros_like(pairs, dtype=torch.bool).scatter_(-1, best, pairs.gather(-1, best) > 0)
        order = value.flatten(-2).argsort(dim=-1, descending=True, stable=True)  # [B, H, Cq * Ck]
        cost = pairs.flatten(-2).gather(-1, order)
        first = kept.flatten(-2).gather(-1, order)

        found = []
        for budget in budgets:
            taken = first
            left = budget - (cost * taken).sum(-1)
            for _ in range(FILL_PASSES):
                # a cell that does not fit is passed over, so that one huge cell does not end the spending
                fits = ~taken & (cost > 0) & (cost <= left[..., None])
                fits &= torch.where(fits, cost, 0).cumsum(-1) <= left[..., None]
                taken = taken | fits
                left = left - (cost * fits).sum(-1)
            found.append(torch.zeros_like(taken).scatter_(-1, order, taken).view_as(kept))
        return torch.stack(found)


def _grouped_logsumexp(logits: Tensor, index: Tensor, groups: int) -> Tensor:
    """logsumexp over the columns with the same index.  # [rows, Nk] -> [rows, groups]"""
    index = index.expand_as(logits)
    top = logits.new_full((logits.shape[0], groups), -torch.inf)
    top.scatter_reduce_(1, index, logits, "amax")
    safe = torch.where(top.isinf(), 0.0, top)
    sums = torch.zeros_like(top).scatter_add_(1, index, (logits - safe.gather(1, index)).exp_())
    return sums.log_().add_(safe)

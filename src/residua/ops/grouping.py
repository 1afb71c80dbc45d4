"""Tokens sorted into groups, and the cells of two groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import Partition
from .constants import FILL_PASSES, MIN_RMS, MIN_SPREAD
from .matrices import MatrixPrimitives, chunk_rows, on_cpu


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
            out /= out.square().mean(-1, keepdim=True).sqrt_().clamp_(min=MIN_RMS)
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
    lengths = torch.cat([sizes, labels.shape[-1] - sizes.sum(-1, keepdim=True)], -1).flatten()
    sums = torch.segment_reduce(take_rows(x, order).float().flatten(0, 2), "sum", lengths=lengths, unsafe=True)
    return sums.view(batch, heads, groups + 1, dim)[..., :groups, :]


def label_means(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """The means that belong to `group_sums`; 0 for an empty group."""
    return group_sums(x, labels, sizes) / sizes.clamp(min=1)[..., None]


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
        pair = torch.where(label[..., 1:] == label[..., :-1], label[..., 1:], -1)
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

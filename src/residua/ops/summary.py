"""What stands for the skipped K/V groups: slots, their mean keys and values, and their drift."""

import torch
from torch import Tensor

from ..types import Partition
from .constants import MIN_VARIANCE
from .grouping import GroupingPrimitives, label_means
from .matrices import chunk_rows


class SummaryPrimitives(GroupingPrimitives):
    """What stands for the skipped K/V groups: slots, their mean keys and values, and their drift."""

    def choose_slots(
        self,
        log_mass: Tensor,
        cells: Tensor,
        query: Partition,
        kv: Partition,
        near: Tensor,
        single: int,
        merged: int,
        wanted: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gives the heaviest groups that a query group skips a slot each, and all other skipped ones the slot
        of their neighbourhood. Repeats give the same bits.

        Args:
            log_mass: [B, H, Cq, Ck].
            cells: [B, H, Cq, Ck] bool, what is kept.
            query: Groups of the queries.
            kv: Groups of the keys.
            near: [B, Hkv, Ck] int64 below `merged`, the neighbourhood of every K/V group.
            single: Slots for one group each; they come first.
            merged: Slots that the others share: `single + near`.
            wanted: [B, H] bool; the other heads get no slots.

        Returns:
            Slots [B, H, Cq, Ck] int32 (-1: none), the log of their masses [B, H, Cq, single + merged] fp32
            (-inf: empty), and each group's share of the skipped mass of its query group [B, H, Cq, Ck] fp32.
        """
        kv_heads = kv.offsets.shape[1]
        heads_per_kv = log_mass.shape[1] // kv_heads
        occupied = kv.sizes.repeat_interleave(heads_per_kv, dim=1)[..., None, :] > 0
        skipped = ~cells & occupied & (query.sizes[..., None] > 0) & wanted[..., None, None]
        mass = torch.where(skipped, log_mass, -torch.inf)
        index = (near.repeat_interleave(heads_per_kv, dim=1) + single)[..., None, :].expand_as(mass)
        # of equal masses the first: `topk` does not say which
        heaviest = mass.sort(dim=-1, descending=True, stable=True).indices[..., :single]  # [B, H, Cq, single]
        index = index.scatter(-1, heaviest, torch.arange(heaviest.shape[-1], device=mass.device).expand_as(heaviest))
        index = torch.where(skipped, index, single + merged)  # a spare last slot for what is kept

        top = mass.new_full((*mass.shape[:-1], single + merged + 1), -torch.inf)
        top = top.scatter_reduce(-1, index, mass, "amax")
        safe = torch.where(top.isinf(), 0.0, top)
        # sums by products with a one-hot matrix: torch's scatter_add_ adds in any order on a GPU
        shared = torch.where(skipped & (index >= single), (mass - safe.gather(-1, index)).exp(), 0.0)
        shared = shared.unflatten(1, (kv_heads, heads_per_kv)).flatten(2, 3)  # [B, Hkv, heads_per_kv * Cq, Ck]
        member = torch.nn.functional.one_hot(near, max(1, merged))[..., :merged].to(shared.dtype)
        total = self.matmul(shared, member).unflatten(2, (heads_per_kv, -1)).flatten(1, 2)  # [B, H, Cq, merged]
        slot_mass = torch.cat([top[..., :single], total.log() + safe[..., single : single + merged]], -1)
        share = torch.where(skipped, (mass - slot_mass.logsumexp(-1, keepdim=True)).exp(), 0.0)
        return torch.where(skipped, index, -1).to(torch.int32), slot_mass, share

    def slot_summary(
        self,
        anchors: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Partition,
        slots: Tensor,
        log_mass: Tensor,
        scale: float,
        near: Tensor | None = None,
        single: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Softmax-weighted mean key and value of the K/V groups that share a slot, at every anchor, and the
        log-weight with which each key has its slot's mass there.

        Key j of a group in slot t weighs exp(scale * anchor . k_j - log_mass[t]), where `log_mass` is the
        log-sum-exp over all keys of the slot. A backend may round the keys and values to the dtypes of k and
        v; the weights belong to what it returns.

        Args:
            anchors: [B, H, Cq, D] fp32.
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            kv: Groups of the keys.
            slots: [B, H, Cq, Ck] int32, -1: none.
            log_mass: [B, H, Cq, T] fp32.
            scale: Factor of the scores.
            near: [B, Hkv, Ck] int64 below T - single; if given, a slot below `single` holds one group of an
                anchor, and a group b in any other is in slot `single + near[b]`.
            single: See `near`.

        Returns:
            Keys [B, H, Cq, T, D] and values [B, H, Cq, T, Dv], 0 in an empty slot, and log-weights [B, H, Cq, T] fp32.
        """
        keys, values = _slot_means(anchors, k, v, kv, slots, log_mass, scale)
        at_anchor = self.matmul(anchors[..., None, :], keys.mT)[..., 0, :]
        return keys, values, log_mass - scale * at_anchor

    def shared_directions(self, spread: Tensor, covariance: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        """The directions in which both queries and keys vary most, as maps to coordinates with y_q . y_k =
        scale * q . k as far as they go; the keys' coordinates have unit variance.

        Args:
            spread: [..., D, D] fp64, of queries around their anchors.
            covariance: [..., D, D] fp64, of keys around their centroids.
            rank: How many directions.
            scale: Factor of the scores.

        Returns:
            The map of queries and that of keys, [..., D, rank] fp32 each.
        """
        mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        minimum = (MIN_VARIANCE * mean).clamp(min=torch.finfo(torch.float32).tiny)
        root = torch.linalg.cholesky_ex(covariance + minimum * eye).L
        leading = self._leading_basis(root.mT @ spread @ root, rank)
        to_key = torch.linalg.solve_triangular(root.mT, leading, upper=True)
        return (scale * (root @ leading)).float(), to_key.float()

    def skipped_covariance(
        self,
        share: Tensor,
        k: Tensor,
        factor: Tensor,
        v: Tensor,
        kv: Partition,
        centroids: Tensor,
        merged: Tensor | None = None,
        near: Tensor | None = None,
        free: int | None = None,
        pooled: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """How the keys' coordinates k @ factor and the values vary together in what is skipped, and how the
        coordinates vary alone: inside the groups, around their means, and among those that share a merged
        slot, every group as one key at its centroid. Groups for which it is not finite count as 0.

        Args:
            share: [B, Hkv, M, Ck], of the groups in each of M mixtures.
            k: [B, Hkv, N, D].
            factor: [B, Hkv, D, R].
            v: [B, Hkv, N, Dv].
            kv: Groups of the keys.
            centroids: [B, Hkv, Ck, D], the groups' mean keys.
            merged: [B, Hkv, M, P], shares of the merged slots; None: there are none.
            near: [B, Hkv, Ck] int64 in range(P), the merged slot of every group.
            free: Groups that may be skipped; these come first. None: all.
            pooled: Whether groups that are near count alike: each then stands for the mean over all keys of
                its merged slot, still around the means of the keys' own groups.

        Returns:
            [B, Hkv, M, R, Dv] and [B, Hkv, M, R].
        """
        if merged is None or near is None:
            return self._mixed_covariance(share, k, factor, v, kv, centroids)
        pools = merged.shape[-1]
        inside = self._mixed_covariance(share, k, factor, v, kv, centroids, near if pooled else None, pools)
        member = torch.where(kv.sizes > 0, near, -1)
        member[..., kv.groups if free is None else free :] = -1
        around = self.sort_groups(member, pools)
        means = self.group_means(v, kv), self.group_means(centroids, around)
        among = self._mixed_covariance(merged, centroids, factor, means[0], around, means[1])
        return inside[0].add_(among[0]), inside[1].add_(among[1])

    def _mixed_covariance(
        self,
        share: Tensor,
        k: Tensor,
        factor: Tensor,
        v: Tensor,
        kv: Partition,
        centroids: Tensor,
        pool: Tensor | None = None,
        pools: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """`skipped_covariance` inside the groups; pool [B, Hkv, Ck] int64 in range(pools) says what counts alike."""
        coordinates = self.project(k, factor, normalise=False)
        covariance, variance = map(self._only_finite, group_covariance(coordinates, v, kv))
        if pool is not None:
            share = self._pooled_share(share, kv, pool, pools)
        mixed = self.matmul(share, covariance.flatten(3)).unflatten(-1, covariance.shape[3:])
        return mixed, self.matmul(share, variance)

    def _pooled_share(self, share: Tensor, kv: Partition, pool: Tensor, pools: int) -> Tensor:
        """Shares of groups in which those of one pool divide the pool's share by their sizes.

        share [B, Hkv, M, Ck], pool [B, Hkv, Ck] int64 in range(pools) -> [B, Hkv, M, Ck]
        """
        # sums by products with a one-hot matrix: torch's scatter_add_ adds in any order on a GPU
        member = torch.nn.functional.one_hot(pool, pools).to(share.dtype)  # [B, Hkv, Ck, pools]
        part = kv.sizes.to(share.dtype)[..., None, :] * member.mT  # [B, Hkv, pools, Ck]
        part = part / part.sum(-1, keepdim=True).clamp(min=1)
        return self.matmul(self.matmul(share, member), part)


def _slot_means(
    anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, cq, dim = anchors.shape
    heads_per_kv, count = heads // k.shape[1], log_mass.shape[-1]
    sums = torch.zeros(batch, heads, cq * (count + 1), dim + v.shape[-1], dtype=torch.float32, device=k.device)
    index = torch.where(slots < 0, count, slots).long()  # cells of no slot share a spare last one
    index = index + torch.arange(cq, device=k.device)[:, None] * (count + 1)  # [B, H, Cq, Ck]
    mass = torch.nn.functional.pad(log_mass, (0, 1), value=torch.inf).flatten(2)
    ends = kv.offsets.tolist()
    for b in range(batch):
        for h in range(heads):
            g = h // heads_per_kv
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
    """How coordinates x [B, Hkv, N, R] and values [B, Hkv, N, Dv] vary together inside each group, and x alone.

    -> [B, Hkv, Ck, R, Dv] and [B, Hkv, Ck, R], both fp32, 0 for an empty group
    """
    batch, heads, tokens, rank = x.shape
    dim, sizes = v.shape[-1], kv.sizes.clamp(min=1)[..., None]
    means, value_means = (label_means(t, kv.labels, kv.sizes) for t in (x, v))
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

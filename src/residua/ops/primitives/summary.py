"""What stands for the skipped K/V groups: slots, their mean keys and values, and their drift."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import Partition
from .. import plain
from .grouping import GroupingPrimitives


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
        return plain.choose_slots(log_mass, cells, query, kv, near, single, merged, wanted, self.matmul)

    def slot_means(
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
    ) -> tuple[Tensor, Tensor]:
        """Softmax-weighted mean key and value of the K/V groups that share a slot, at every anchor.

        Key j of a group in slot t weighs exp(scale * anchor . k_j - log_mass[t]) there, where `log_mass` is
        the log-sum-exp over all keys of the slot.

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
            Keys [B, H, Cq, T, D] and values [B, H, Cq, T, Dv], fp32, 0 in an empty slot.
        """
        return plain.slot_means(anchors, k, v, kv, slots, log_mass, scale)

    def slot_summary(
        self,
        anchors: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Partition,
        slots: Tensor,
        log_mass: Tensor,
        scale: float,
        near: Tensor,
        single: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`slot_means`, and the log-weight with which each key has its slot's mass at the anchor. A backend
        may round the keys and values to the dtypes of k and v; the weights belong to what it returns.

        Args:
            anchors: As in `slot_means`.
            k: As in `slot_means`.
            v: As in `slot_means`.
            kv: As in `slot_means`.
            slots: As in `slot_means`.
            log_mass: As in `slot_means`.
            scale: As in `slot_means`.
            near: As in `slot_means`.
            single: As in `slot_means`.

        Returns:
            Keys [B, H, Cq, T, D], values [B, H, Cq, T, Dv], and log-weights [B, H, Cq, T] fp32.
        """
        keys, values = self.slot_means(anchors, k, v, kv, slots, log_mass, scale, near, single)
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
        return plain.shared_directions(spread, covariance, rank, scale)

    def mixed_covariance(
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
        """How the keys' coordinates and the values vary together in a mixture of groups, and how the
        coordinates vary alone: `group_covariance` in the coordinates k @ factor, summed by `share`. Groups
        for which it is not finite count as 0.

        Args:
            share: [B, Hkv, M, Ck], the mixtures.
            k: [B, Hkv, N, D].
            factor: [B, Hkv, D, R].
            v: [B, Hkv, N, Dv].
            kv: Groups of the keys.
            centroids: [B, Hkv, Ck, D], the groups' mean keys.
            pool: [B, Hkv, Ck] int64 in range(pools); if given, groups of one pool count alike: each stands
                for the mean over all keys of its pool, still around the means of the keys' own groups.
            pools: See `pool`.

        Returns:
            [B, Hkv, M, R, Dv] and [B, Hkv, M, R].
        """
        coordinates = self.project(k, factor, normalise=False)
        covariance, variance = map(self.only_finite, self.group_covariance(coordinates, v, kv))
        if pool is not None:
            share = plain.pooled_share(share, kv, pool, pools, self.matmul)
        mixed = self.matmul(share, covariance.flatten(3)).unflatten(-1, covariance.shape[3:])
        return mixed, self.matmul(share, variance)

    def skipped_covariance(
        self,
        share: Tensor,
        merged: Tensor,
        k: Tensor,
        factor: Tensor,
        v: Tensor,
        kv: Partition,
        centroids: Tensor,
        near: Tensor,
        free: int,
        pooled: bool,
    ) -> tuple[Tensor, Tensor]:
        """`mixed_covariance` of what is skipped: inside the groups, and among those that share a merged slot,
        every group as one key at its centroid.

        Args:
            share: [B, Hkv, M, Ck], of the groups.
            merged: [B, Hkv, M, P], of the merged slots.
            k: As in `mixed_covariance`.
            factor: As in `mixed_covariance`.
            v: As in `mixed_covariance`.
            kv: As in `mixed_covariance`.
            centroids: As in `mixed_covariance`.
            near: [B, Hkv, Ck] int64 in range(P), the merged slot of every group.
            free: Groups that may be skipped; these come first.
            pooled: Whether neighbours are one pool of `mixed_covariance`.

        Returns:
            As `mixed_covariance`.
        """
        pools = merged.shape[-1]
        pool = near if pooled else None
        slope, curve = self.mixed_covariance(share, k, factor, v, kv, centroids, pool, pools)
        member = torch.where(kv.sizes > 0, near, -1)
        member[..., free:] = -1
        around = self.sort_groups(member, pools)
        more_slope, more_curve = self.mixed_covariance(
            merged, centroids, factor, self.group_means(v, kv), around, self.group_means(centroids, around)
        )
        return slope.add_(more_slope), curve.add_(more_curve)

    def group_covariance(self, x: Tensor, v: Tensor, kv: Partition) -> tuple[Tensor, Tensor]:
        """How coordinates and values vary together inside each group, around the group's means.

        Args:
            x: [B, Hkv, N, R] fp32.
            v: [B, Hkv, N, Dv].
            kv: Groups of the keys.

        Returns:
            The covariance [B, Hkv, Ck, R, Dv] and the variance of x [B, Hkv, Ck, R], both fp32, 0 for an
            empty group.
        """
        return plain.group_covariance(x, v, kv)

"""What stands for the skipped K/V groups, in the native library."""

import math

import torch
from torch import Tensor

from ...types import Partition
from ..constants import MIN_VARIANCE, SUBSPACE_SHIFT, SUBSPACE_STEPS
from . import abi
from .abi import floats, new_floats
from .library import NativeBase


class NativeSummary(NativeBase):
    """What stands for the skipped K/V groups, in the native library."""

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
        batch, heads, query_groups, kv_groups = log_mass.shape
        slots, share = torch.empty(log_mass.shape, dtype=torch.int32), new_floats(*log_mass.shape)
        slot_mass = new_floats(batch, heads, query_groups, single + merged)
        groups = dict(heads=batch * heads, query_groups=query_groups, kv_groups=kv_groups)
        counts = dict(heads_per_kv=heads // kv.offsets.shape[1], single=single, merged=merged)
        offsets = dict(query_offsets=query.offsets, kv_offsets=kv.offsets)
        tensors = dict(log_mass=floats(log_mass), cells=cells, near=near, wanted=wanted)
        results = dict(slots=slots, slot_mass=slot_mass, share=share)
        self._run("choose_slots", abi.ChooseArgs(**groups, **counts, **offsets, **tensors, **results))
        return slots, slot_mass, share

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
        *heads, dim = *log_mass.shape, anchors.shape[-1]
        keys, values, weight = new_floats(*heads, dim), new_floats(*heads, v.shape[-1]), new_floats(*heads)
        # Anchors of the query heads that share a K/V head are one block, as in `cell_mass`.
        shape = abi.Shape.of(anchors, k, v, queries=anchors.shape[1] // k.shape[1] * anchors.shape[2])
        tensors = dict(kv=kv, anchors=floats(anchors), k=k, v=v, near=near)
        chosen = dict(slots=slots.int(), log_mass=floats(log_mass), count=log_mass.shape[-1])
        results = dict(keys=keys, values=values, weight=weight)
        self._run("slot_means", abi.SlotsArgs(shape=shape, **tensors, **chosen, **results, scale=scale, dtype=k.dtype))
        return keys, values, weight

    def shared_directions(self, spread: Tensor, covariance: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        *heads, dim, _ = covariance.shape
        to_query, to_key = new_floats(*heads, dim, rank), new_floats(*heads, dim, rank)
        sizes = dict(heads=math.prod(heads), dim=dim, rank=rank, steps=SUBSPACE_STEPS)
        tiny = torch.finfo(torch.float32).tiny
        limits = dict(scale=scale, min_variance=MIN_VARIANCE, tiny=tiny, shift=SUBSPACE_SHIFT)
        tensors = dict(spread=spread.double(), covariance=covariance.double(), to_query=to_query, to_key=to_key)
        self._run("directions", abi.DirectionsArgs(**sizes, **limits, **tensors))
        return to_query, to_key

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
        if pool is None:
            pool, pools = torch.arange(kv.groups).expand(*k.shape[:2], -1), kv.groups
        batch, heads, count, _ = share.shape
        rank = factor.shape[-1]
        slope, curve = new_floats(batch, heads, count, rank, v.shape[-1]), new_floats(batch, heads, count, rank)
        sizes = dict(shape=abi.Shape.of(k, k, v, queries=count), rank=rank, pools=pools, dtype=k.dtype)
        tensors = dict(kv=kv, k=k, v=v, factor=floats(factor), centroids=floats(centroids), share=floats(share))
        self._run("mixed_covariance", abi.CovarianceArgs(**sizes, **tensors, pool=pool, slope=slope, curve=curve))
        return slope, curve

"""What stands for the skipped K/V groups, in the native library."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...types import Partition
from ..constants import MIN_VARIANCE, SUBSPACE_SHIFT, SUBSPACE_STEPS
from . import abi
from .arguments import bytes_of, contiguous, floats, groups_of, new_floats, pointer, row_major, shape_of
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
        mass, kept, wanted_heads = floats(log_mass), bytes_of(cells), bytes_of(wanted)
        near, query_offsets, kv_offsets = (t.contiguous() for t in (near, query.offsets, kv.offsets))
        batch, heads, query_groups, kv_groups = mass.shape
        slots, share = torch.empty(mass.shape, dtype=torch.int32), torch.empty_like(mass)
        slot_mass = new_floats(batch, heads, query_groups, single + merged)
        args = abi.ChooseArgs(
            heads=batch * heads,
            heads_per_kv=heads // kv_offsets.shape[1],
            query_groups=query_groups,
            kv_groups=kv_groups,
            single=single,
            merged=merged,
            log_mass=mass.data_ptr(),
            cells=pointer(kept),
            query_offsets=query_offsets.data_ptr(),
            kv_offsets=kv_offsets.data_ptr(),
            near=near.data_ptr(),
            wanted=pointer(wanted_heads),
            slots=slots.data_ptr(),
            slot_mass=slot_mass.data_ptr(),
            share=share.data_ptr(),
        )
        self._run("choose_slots", args)
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
        anchors, k, v, log_mass = floats(anchors), row_major(k), row_major(v), floats(log_mass)
        kv, slots = contiguous(kv), slots.int().contiguous()
        near = None if near is None else near.contiguous()
        *heads, dim = *log_mass.shape, anchors.shape[-1]
        keys, values, weight = new_floats(*heads, dim), new_floats(*heads, v.shape[-1]), new_floats(*heads)
        # Anchors of the query heads that share a K/V head are one block, as in `cell_mass`.
        shape = shape_of(anchors, k, v)
        shape.queries = anchors.shape[1] // k.shape[1] * anchors.shape[2]
        args = abi.SlotsArgs(
            shape=shape,
            kv=groups_of(kv),
            anchors=anchors.data_ptr(),
            k=abi.View.of(k),
            v=abi.View.of(v),
            slots=slots.data_ptr(),
            log_mass=log_mass.data_ptr(),
            near=pointer(near),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            weight=weight.data_ptr(),
            count=log_mass.shape[-1],
            scale=scale,
            dtype=abi.DTYPES[k.dtype],
        )
        self._run("slot_means", args)
        return keys, values, weight

    def shared_directions(self, spread: Tensor, covariance: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        spread, covariance = spread.double().contiguous(), covariance.double().contiguous()
        *heads, dim, _ = covariance.shape
        to_query, to_key = new_floats(*heads, dim, rank), new_floats(*heads, dim, rank)
        args = abi.DirectionsArgs(
            heads=math.prod(heads),
            dim=dim,
            rank=rank,
            steps=SUBSPACE_STEPS,
            scale=scale,
            floor=MIN_VARIANCE,
            tiny=torch.finfo(torch.float32).tiny,
            shift=SUBSPACE_SHIFT,
            spread=spread.data_ptr(),
            covariance=covariance.data_ptr(),
            to_query=to_query.data_ptr(),
            to_key=to_key.data_ptr(),
        )
        self._run("directions", args)
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
        k, v, kv = row_major(k), row_major(v), contiguous(kv)
        share, factor, centroids = floats(share), floats(factor), floats(centroids)
        if pool is None:
            pool, pools = torch.arange(kv.groups).expand(*k.shape[:2], -1), kv.groups
        pool = pool.contiguous()
        batch, heads, count, _ = share.shape
        rank = factor.shape[-1]
        slope, curve = (new_floats(batch, heads, count, rank, v.shape[-1]), new_floats(batch, heads, count, rank))
        shape = shape_of(k, k, v)
        shape.queries = count
        args = abi.CovarianceArgs(
            shape=shape,
            kv=groups_of(kv),
            k=abi.View.of(k),
            v=abi.View.of(v),
            factor=factor.data_ptr(),
            centroids=centroids.data_ptr(),
            share=share.data_ptr(),
            pool=pool.data_ptr(),
            slope=slope.data_ptr(),
            curve=curve.data_ptr(),
            rank=rank,
            pools=pools,
            dtype=abi.DTYPES[k.dtype],
        )
        self._run("mixed_covariance", args)
        return slope, curve

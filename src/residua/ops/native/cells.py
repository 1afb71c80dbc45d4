"""What a cell weighs, and which cells a budget buys, in the native library."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...types import Partition
from ..constants import FILL_PASSES
from . import abi
from .arguments import contiguous, floats, groups_of, new_floats, row_major, shape_of
from .library import NativeBase

MASS_KEYS = 2048  # keys of a task of `cell_mass`, about


class NativeCells(NativeBase):
    """What a cell weighs, and which cells a budget buys, in the native library."""

    def cell_mass(self, anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
        anchors, k = floats(anchors), row_major(k)
        batch, heads, count, _ = anchors.shape
        kv_heads, keys = k.shape[1:3]
        mass = new_floats(batch, heads, count, kv.groups)
        kv = contiguous(kv)
        # Anchors of the query heads that share a K/V head are one block: its keys are packed once for all.
        shape = shape_of(anchors, k, k)
        shape.queries = heads // kv_heads * count
        task_groups = max(1, MASS_KEYS * kv.groups // max(1, keys))
        args = abi.MassArgs(
            shape=shape,
            kv=groups_of(kv),
            anchors=anchors.data_ptr(),
            k=abi.View.of(k),
            mass=mass.data_ptr(),
            task_groups=task_groups,
            scale=scale,
            dtype=abi.DTYPES[k.dtype],
        )
        self._run("cell_mass", args)
        return mass

    def _spend(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor]) -> Tensor:
        *heads, query_groups, kv_groups = log_share.shape
        share, log_sizes = floats(log_share), kv_sizes.clamp(min=1).float().log()
        queries, keys = query_sizes.contiguous(), kv_sizes.contiguous()
        budget = torch.stack([own.expand(heads) for own in budgets])
        cells = torch.empty(len(budgets), *share.shape, dtype=torch.bool)
        args = abi.SpendArgs(
            heads=math.prod(heads),
            query_groups=query_groups,
            kv_groups=kv_groups,
            passes=FILL_PASSES,
            budgets=len(budgets),
            log_share=share.data_ptr(),
            log_sizes=log_sizes.data_ptr(),
            query_sizes=queries.data_ptr(),
            kv_sizes=keys.data_ptr(),
            budget=budget.data_ptr(),
            cells=cells.data_ptr(),
        )
        self._run("spend", args)
        return cells

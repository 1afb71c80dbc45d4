"""What a cell weighs, and which cells a budget buys, in the native library."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...types import Partition
from ..constants import FILL_PASSES
from . import abi
from .abi import floats, new_floats
from .library import NativeBase

MASS_KEYS = 2048  # keys of a task of `cell_mass`, about


class NativeCells(NativeBase):
    """What a cell weighs, and which cells a budget buys, in the native library."""

    def cell_mass(self, anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
        batch, heads, count, _ = anchors.shape
        kv_heads, keys = k.shape[1:3]
        mass = new_floats(batch, heads, count, kv.groups)
        # Anchors of the query heads that share a K/V head are one block: its keys are packed once for all.
        shape = abi.Shape.of(anchors, k, k, queries=heads // kv_heads * count)
        task_groups = max(1, MASS_KEYS * kv.groups // max(1, keys))
        args = abi.MassArgs(
            shape=shape,
            kv=kv,
            anchors=floats(anchors),
            k=k,
            mass=mass,
            task_groups=task_groups,
            scale=scale,
            dtype=k.dtype,
        )
        self._run("cell_mass", args)
        return mass

    def _spend(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor]) -> Tensor:
        *heads, query_groups, kv_groups = log_share.shape
        cells = torch.empty(len(budgets), *log_share.shape, dtype=torch.bool)
        args = abi.SpendArgs(
            heads=math.prod(heads),
            query_groups=query_groups,
            kv_groups=kv_groups,
            passes=FILL_PASSES,
            budgets=len(budgets),
            log_share=floats(log_share),
            log_sizes=kv_sizes.clamp(min=1).float().log(),
            query_sizes=query_sizes,
            kv_sizes=kv_sizes,
            budget=torch.stack([own.expand(heads) for own in budgets]),
            cells=cells,
        )
        self._run("spend", args)
        return cells

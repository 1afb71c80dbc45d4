"""Tokens sorted into groups, and the cells of two groups, in the native library."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...types import Partition
from ..constants import FILL_PASSES, MIN_RMS
from . import abi
from .abi import floats, new_floats, row_major
from .library import NativeBase


class NativeGrouping(NativeBase):
    """Tokens sorted into groups, in the native library."""

    def project(self, x: Tensor, factor: Tensor, normalise: bool, rough: bool = False) -> Tensor:
        out = new_floats(*x.shape[:3], factor.shape[-1])
        tensors = dict(x=x, factor=floats(factor), out=out)
        numbers = dict(rank=factor.shape[-1], min_rms=MIN_RMS, normalise=normalise, dtype=x.dtype)
        self._run("project", abi.ProjectArgs(shape=abi.Shape.of(x), **tensors, **numbers))
        return out

    def lloyd(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None, means: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, centres = self._only_finite(x), self._only_finite(centres)
        heads, tokens, rank = x.shape
        groups = centres.shape[1]
        labels, found = torch.empty(heads, tokens, dtype=torch.long), new_floats(*centres.shape)
        counts = torch.empty(heads, groups, dtype=torch.long)
        sizes = dict(heads=heads, tokens=tokens, rank=rank, groups=groups, steps=steps)
        tensors = dict(x=x, centres=centres, valid=valid, labels=labels, means=found, sizes=counts)
        self._run("kmeans", abi.KmeansArgs(**sizes, **tensors))
        return labels, found, counts

    def sort_groups(self, labels: Tensor, groups: int) -> Partition:
        labels = labels.contiguous()
        *heads, tokens = labels.shape
        order, offsets = torch.empty_like(labels), labels.new_empty(*heads, groups + 1)
        sizes = dict(heads=math.prod(heads), tokens=tokens, groups=groups)
        self._run("sort_groups", abi.SortArgs(**sizes, labels=labels, order=order, offsets=offsets))
        return Partition(labels, order, offsets)

    def gather_rows(self, x: Tensor, order: Tensor) -> Tensor:
        x = row_major(x)
        batch, heads, tokens, dim = x.shape
        out = torch.empty(batch, heads, order.shape[-1], dim, dtype=x.dtype)
        size = x.element_size()
        sizes = dict(batch=batch, heads=heads, tokens=tokens, rows=order.shape[-1], row_bytes=dim * size)
        self._run("gather_rows", abi.GatherArgs(**sizes, x=abi.View.of(x, size), order=order, out=out))
        return out

    def group_means(self, x: Tensor, partition: Partition, keep: bool = False) -> Tensor:
        means = new_floats(*x.shape[:2], partition.groups, x.shape[-1])
        tensors = dict(groups=partition, x=x, means=means)
        self._run("group_means", abi.MeansArgs(shape=abi.Shape.of(x), **tensors, dtype=x.dtype))
        return means

    def central_rows(self, x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
        *heads, tokens = labels.shape
        rows = labels.new_empty(*heads, count)
        sizes = dict(heads=math.prod(heads), tokens=tokens, rank=x.shape[-1], groups=groups, count=count)
        self._run("central_rows", abi.CentralArgs(**sizes, x=floats(x), labels=labels, rows=rows))
        return rows


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
        tensors = dict(kv=kv, anchors=floats(anchors), k=k, mass=mass)
        numbers = dict(task_groups=task_groups, scale=scale, dtype=k.dtype)
        self._run("cell_mass", abi.MassArgs(shape=shape, **tensors, **numbers))
        return mass

    def _spend(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor]) -> Tensor:
        *heads, query_groups, kv_groups = log_share.shape
        cells = torch.empty(len(budgets), *log_share.shape, dtype=torch.bool)
        sizes = dict(heads=math.prod(heads), query_groups=query_groups, kv_groups=kv_groups, budgets=len(budgets))
        weights = dict(log_share=floats(log_share), log_sizes=kv_sizes.clamp(min=1).float().log())
        counts = dict(query_sizes=query_sizes, kv_sizes=kv_sizes)
        budget = torch.stack([own.expand(heads) for own in budgets])
        self._run("spend", abi.SpendArgs(**sizes, passes=FILL_PASSES, **weights, **counts, budget=budget, cells=cells))
        return cells

"""Tokens sorted into groups, in the native library."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...types import Partition
from ..constants import MIN_RMS
from . import abi
from .arguments import bytes_of, contiguous, floats, groups_of, new_floats, pointer, row_major, shape_of
from .library import NativeBase


class NativeGrouping(NativeBase):
    """Tokens sorted into groups, in the native library."""

    def project(self, x: Tensor, factor: Tensor, normalise: bool, rough: bool = False) -> Tensor:
        x, factor = row_major(x), floats(factor)
        out = new_floats(*x.shape[:3], factor.shape[-1])
        args = abi.ProjectArgs(
            shape=shape_of(x, x, x),
            x=abi.View.of(x),
            factor=factor.data_ptr(),
            out=out.data_ptr(),
            rank=factor.shape[-1],
            rms_floor=MIN_RMS,
            normalise=int(normalise),
            dtype=abi.DTYPES[x.dtype],
        )
        self._run("project", args)
        return out

    def lloyd(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None, means: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, centres, mask = self._only_finite(x), self._only_finite(centres), bytes_of(valid)
        heads, tokens, rank = x.shape
        groups = centres.shape[1]
        labels = torch.empty(heads, tokens, dtype=torch.long)
        found = torch.empty_like(centres)
        sizes = torch.empty(heads, groups, dtype=torch.long)
        args = abi.KmeansArgs(
            heads=heads,
            tokens=tokens,
            rank=rank,
            groups=groups,
            steps=steps,
            x=x.data_ptr(),
            centres=centres.data_ptr(),
            valid=pointer(mask),
            labels=labels.data_ptr(),
            means=found.data_ptr(),
            sizes=sizes.data_ptr(),
        )
        self._run("kmeans", args)
        return labels, found, sizes

    def sort_groups(self, labels: Tensor, groups: int) -> Partition:
        labels = labels.contiguous()
        *heads, tokens = labels.shape
        order, offsets = torch.empty_like(labels), labels.new_empty(*heads, groups + 1)
        args = abi.SortArgs(
            heads=math.prod(heads),
            tokens=tokens,
            groups=groups,
            labels=labels.data_ptr(),
            order=order.data_ptr(),
            offsets=offsets.data_ptr(),
        )
        self._run("sort_groups", args)
        return Partition(labels, order, offsets)

    def gather_rows(self, x: Tensor, order: Tensor) -> Tensor:
        x, order = row_major(x), order.contiguous()
        batch, heads, tokens, dim = x.shape
        out = torch.empty(batch, heads, order.shape[-1], dim, dtype=x.dtype)
        args = abi.GatherArgs(
            batch=batch,
            heads=heads,
            tokens=tokens,
            rows=order.shape[-1],
            row_bytes=dim * x.element_size(),
            x=abi.View.of(x, x.element_size()),
            order=order.data_ptr(),
            out=out.data_ptr(),
        )
        self._run("gather_rows", args)
        return out

    def group_means(self, x: Tensor, partition: Partition, keep: bool = False) -> Tensor:
        x = row_major(x)
        means = new_floats(*x.shape[:2], partition.groups, x.shape[-1])
        partition = contiguous(partition)
        args = abi.MeansArgs(
            shape=shape_of(x, x, x),
            groups=groups_of(partition),
            x=abi.View.of(x),
            means=means.data_ptr(),
            dtype=abi.DTYPES[x.dtype],
        )
        self._run("group_means", args)
        return means

    def central_rows(self, x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
        x, labels = floats(x), labels.contiguous()
        *heads, tokens = labels.shape
        rows = labels.new_empty(*heads, count)
        args = abi.CentralArgs(
            heads=math.prod(heads),
            tokens=tokens,
            rank=x.shape[-1],
            groups=groups,
            count=count,
            x=x.data_ptr(),
            labels=labels.data_ptr(),
            rows=rows.data_ptr(),
        )
        self._run("central_rows", args)
        return rows

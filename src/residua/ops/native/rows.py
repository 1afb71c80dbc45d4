"""Rows that are computed exactly, and what is learned from them, in the native library."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...types import Partition, ResidualFit
from ..plain.residual_fit import FEATURE_EPS, MAX_LEVERAGE, MIN_ENERGY
from . import abi
from .arguments import bytes_of, floats, new_floats, pointer, row_major, shape_of
from .base import NativeBase

ROW_BLOCK = 240  # rows of `attend_rows` that share one pass over a chunk of keys
ROW_CHUNK = 2048  # keys of such a chunk, at least
ROW_PARTS = 32  # row blocks x chunks that keep many cores busy


class NativeRows(NativeBase):
    """Rows that are computed exactly, and what is learned from them, in the native library."""

    def attend_rows(self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
        return self._exact_rows(rows, k, v, None, None, key_mask, scale)[0]

    def split_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._exact_rows(rows, k, v, kv, kept, key_mask, scale)

    def _exact_rows(
        self,
        rows: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Partition | None,
        kept: Tensor | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if rows.dtype != k.dtype:
            rows, k, v = rows.float(), k.float(), v.float()
        rows, k, v, mask, kept = (row_major(rows), row_major(k), row_major(v), bytes_of(key_mask), bytes_of(kept))
        labels = None if kv is None else kv.labels.contiguous()
        order = None if kv is None else kv.order.contiguous()
        batch, heads, count, _ = rows.shape
        out = new_floats(batch, heads, count, v.shape[-1])
        part = out if kept is None else torch.empty_like(out)
        lse = new_floats(batch, heads, count)
        block = max(1, min(count, ROW_BLOCK))
        blocks = -(-count // block)
        chunks = max(1, min(-(-k.shape[2] // ROW_CHUNK), ROW_PARTS // max(1, blocks)))
        width = -(-v.shape[-1] // 16) * 16
        states = 1 if kept is None else 2
        partial = new_floats(batch * heads * blocks * chunks, states * block * (width + 2))
        args = abi.RowsArgs(
            shape=shape_of(rows, k, v),
            q=abi.View.of(rows),
            k=abi.View.of(k),
            v=abi.View.of(v),
            out=abi.View.of(out),
            key_mask=pointer(mask),
            partial=partial.data_ptr(),
            block_rows=block,
            chunks=chunks,
            kept=pointer(kept),
            labels=pointer(labels),
            order=pointer(order),
            groups=0 if kept is None else kept.shape[-1],
            part=part.data_ptr(),
            part_lse=lse.data_ptr(),
            scale=scale,
            dtype=abi.DTYPES[rows.dtype],
        )
        self._run("attend_rows", args)
        return out, part, lse

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

    def fit_residual(
        self, x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
    ) -> ResidualFit:
        x, residual, weights = floats(x), floats(residual), floats(weights)
        *heads, count, dim = x.shape
        rank = min(rank, count, dim) if subspace else dim
        left, right = new_floats(*heads, dim, rank), new_floats(*heads, rank, dim)
        bias, left_out = new_floats(*heads, dim), torch.empty_like(x)
        args = abi.FitArgs(
            heads=math.prod(heads),
            rows=count,
            dim=dim,
            rank=rank,
            subspace=int(subspace),
            ridge=ridge,
            feature_eps=FEATURE_EPS,
            max_leverage=MAX_LEVERAGE,
            min_energy=MIN_ENERGY,
            x=x.data_ptr(),
            residual=residual.data_ptr(),
            weights=weights.data_ptr(),
            left=left.data_ptr(),
            right=right.data_ptr(),
            bias=bias.data_ptr(),
            left_out=left_out.data_ptr(),
        )
        self._run("fit_residual", args)
        return ResidualFit(left, right, bias, left_out)

    def add_affine(self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        out = row_major(out.float())
        left, right, bias = floats(left), floats(right), floats(bias)
        result = out if dtype == torch.float32 else torch.empty(out.shape, dtype=dtype)
        args = abi.AffineArgs(
            shape=shape_of(out, out, out),
            x=abi.View.of(out),
            out=abi.View.of(result),
            left=left.data_ptr(),
            right=right.data_ptr(),
            bias=bias.data_ptr(),
            rank=left.shape[-1],
            out_dtype=abi.DTYPES[dtype],
        )
        self._run("add_affine", args)
        return result

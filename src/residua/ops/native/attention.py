"""Attention over what is kept, and of single rows over everything, in the native library."""

import torch
from torch import Tensor

from ...types import MAX_BEND, Partition, Route, SummaryKeys
from . import abi
from .abi import floats, new_floats
from .library import NativeBase

ROW_BLOCK = 240  # rows of `attend_rows` that share one pass over a chunk of keys
ROW_CHUNK = 2048  # keys of such a chunk, at least
ROW_PARTS = 32  # row blocks x chunks that keep many cores busy


class NativeAttention(NativeBase):
    """Attention over what is kept, and of single rows over everything."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        scale: float,
        summary: SummaryKeys | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype or q.dtype)
        lse = new_floats(*q.shape[:-1])
        keys = values = weight = basis = origin = curve = slope = None
        if summary is not None and summary.log_weight.shape[-1]:
            keys, values, weight = floats(summary.keys), floats(summary.values), floats(summary.log_weight)
            if summary.drift is not None:
                basis, origin = floats(summary.drift.basis), floats(summary.drift.origin)
                curve, slope = floats(summary.drift.curve), floats(summary.drift.slope)
        tensors = dict(q=q, k=k, v=v, out=out, lse=lse, query=route.query, kv=route.kv, cells=route.cells)
        means = dict(summary_keys=keys, summary_values=values, summary_weight=weight)
        drift = dict(basis=basis, origin=origin, curve=curve, slope=slope)
        counts = dict(
            summary_count=0 if weight is None else weight.shape[-1], rank=0 if basis is None else basis.shape[-1]
        )
        numbers = dict(scale=scale, max_bend=MAX_BEND, dtype=q.dtype, out_dtype=out.dtype)
        args = abi.AttendArgs(shape=abi.Shape.of(q, k, v), **tensors, **means, **drift, **counts, **numbers)
        self._run("attend", args)
        return out, lse

    def attend_rows(self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
        return self.split_rows(rows, k, v, None, None, key_mask, scale)[0]

    def split_rows(
        self,
        rows: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Partition | None,
        kept: Tensor | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One kernel for both: without `kept` it computes the exact output alone."""
        if rows.dtype != k.dtype:
            rows, k, v = rows.float(), k.float(), v.float()
        batch, heads, count, _ = rows.shape
        out = new_floats(batch, heads, count, v.shape[-1])
        part = out if kept is None else torch.empty_like(out)
        lse = new_floats(batch, heads, count)
        block = max(1, min(count, ROW_BLOCK))
        blocks = -(-count // block)
        chunks = max(1, min(-(-k.shape[2] // ROW_CHUNK), ROW_PARTS // max(1, blocks)))
        width = -(-v.shape[-1] // 16) * 16
        partial = new_floats(batch * heads * blocks * chunks, (1 if kept is None else 2) * block * (width + 2))
        tensors = dict(q=rows, k=k, v=v, key_mask=key_mask, out=out, part=part, part_lse=lse, partial=partial)
        choice = dict(kept=kept, groups=0 if kept is None else kept.shape[-1])
        keys = dict(labels=None, order=None) if kv is None else dict(labels=kv.labels, order=kv.order)
        numbers = dict(block_rows=block, chunks=chunks, scale=scale, dtype=rows.dtype)
        self._run("attend_rows", abi.RowsArgs(shape=abi.Shape.of(rows, k, v), **tensors, **choice, **keys, **numbers))
        return out, part, lse

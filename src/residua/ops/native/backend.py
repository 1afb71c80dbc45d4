"""The CPU backend in C++: fused kernels for AVX-512, AVX2 and any other processor, chosen when it loads.

The sources are in `src/`; the library is built with the package and loaded through a plain C interface.
Work is cut into tasks whose results never depend on the number of threads: they are bit-identical on repeats
and across thread counts. Memory beyond the outputs is a few hundred KiB per thread.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...types import MAX_BEND, Route, SummaryKeys
from ..backend import BACKENDS
from . import abi
from .arguments import bytes_of, contiguous, floats, groups_of, new_floats, pointer, row_major, shape_of
from .grouping import NativeGrouping
from .numbers import NativeNumbers
from .routing import NativeRouting
from .rows import NativeRows
from .summary import NativeSummary


@BACKENDS.register
class NativeBackend(NativeGrouping, NativeRouting, NativeSummary, NativeRows, NativeNumbers):
    """Attention over a route; the other primitives are in the files of their subjects."""

    name: ClassVar[str] = "native"
    about: ClassVar[str] = "fused C++ kernels for the CPU"
    preference: ClassVar[int] = 100
    deterministic: ClassVar[bool] = True
    adds_by_slot: ClassVar[bool] = True

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
        q, k, v = row_major(q), row_major(k), row_major(v)
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype or q.dtype)
        lse = new_floats(*q.shape[:-1])
        query, kv, cells = contiguous(route.query), contiguous(route.kv), bytes_of(route.cells)
        keys = values = weight = basis = origin = curve = slope = None
        if summary is not None and summary.log_weight.shape[-1]:
            keys, values, weight = floats(summary.keys), floats(summary.values), floats(summary.log_weight)
            if summary.drift is not None:
                drift = summary.drift
                basis, origin = floats(drift.basis), floats(drift.origin)
                curve, slope = floats(drift.curve), floats(drift.slope)
        args = abi.AttendArgs(
            shape=shape_of(q, k, v), query=groups_of(query), kv=groups_of(kv),
            q=abi.View.of(q), k=abi.View.of(k), v=abi.View.of(v), out=abi.View.of(out),
            lse=lse.data_ptr(), cells=pointer(cells),
            summary_keys=pointer(keys), summary_values=pointer(values), summary_weight=pointer(weight),
            basis=pointer(basis), origin=pointer(origin), curve=pointer(curve), slope=pointer(slope),
            summary_count=0 if weight is None else weight.shape[-1],
            rank=0 if basis is None else basis.shape[-1],
            scale=scale, max_bend=MAX_BEND, dtype=abi.DTYPES[q.dtype], out_dtype=abi.DTYPES[out.dtype],
        )  # fmt: skip
        self._run("attend", args)
        return out, lse

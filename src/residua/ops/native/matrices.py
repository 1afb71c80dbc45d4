"""Small matrices, and numbers that are not finite, in the native library."""

from __future__ import annotations

import math
from ctypes import addressof, c_int32

import torch
from torch import Tensor

from . import abi
from .arguments import bytes_of, floats, new_floats, pointer, row_major, shape_of
from .library import NativeBase


class NativeMatrices(NativeBase):
    """Small matrices, and numbers that are not finite, in the native library."""

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        turned = y.stride(-1) != 1 and y.stride(-2) == 1  # a transposed view needs no copy
        x, right = floats(x), floats(y.mT if turned else y)
        out = new_floats(*x.shape[:-1], y.shape[-1])
        args = abi.MatmulArgs(
            matrices=math.prod(x.shape[:-2]),
            rows=x.shape[-2],
            inner=x.shape[-1],
            columns=y.shape[-1],
            transposed=int(turned),
            x=x.data_ptr(),
            y=right.data_ptr(),
            out=out.data_ptr(),
        )
        self._run("matmul", args)
        return out

    def _eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        matrix = matrix.double().contiguous()
        vectors, values = torch.empty_like(matrix), torch.empty_like(matrix[..., 0])
        size = matrix.shape[-1]
        args = abi.EigenArgs(
            count=values.numel() // max(1, size),
            size=size,
            matrix=matrix.data_ptr(),
            values=values.data_ptr(),
            vectors=vectors.data_ptr(),
        )
        self._run("eigh", args)
        return values, vectors.mT

    def second_moment(self, x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
        x, mask = row_major(x), bytes_of(counted)
        batch, heads, _, dim = x.shape
        moment = torch.empty(batch, heads, dim, dim, dtype=torch.double)
        args = abi.MomentArgs(
            shape=shape_of(x, x, x),
            x=abi.View.of(x),
            counted=pointer(mask),
            moment=moment.data_ptr(),
            centred=int(centred),
            dtype=abi.DTYPES[x.dtype],
        )
        self._run("second_moment", args)
        return moment

    def _only_finite(self, x: Tensor) -> Tensor:
        x, finite = floats(x), c_int32()
        self._run("all_finite", abi.FiniteArgs(count=x.numel(), x=x.data_ptr(), finite=addressof(finite)))
        return x if finite.value else super()._only_finite(x)

    def row_peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = row_major(x)
        peaks, finite = new_floats(*x.shape[:3]), torch.empty(x.shape[:3], dtype=torch.bool)
        args = abi.PeaksArgs(
            shape=shape_of(x, x, x),
            x=abi.View.of(x),
            peaks=peaks.data_ptr(),
            finite=finite.data_ptr(),
            dtype=abi.DTYPES[x.dtype],
        )
        self._run("row_peaks", args)
        return peaks, finite

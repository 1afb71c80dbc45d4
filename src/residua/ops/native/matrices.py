"""Small matrices, and numbers that are not finite, in the native library."""

import math
from ctypes import addressof, c_int32

import torch
from torch import Tensor

from . import abi
from .abi import floats, new_floats
from .library import NativeBase


class NativeMatrices(NativeBase):
    """Small matrices, and numbers that are not finite, in the native library."""

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        turned = y.stride(-1) != 1 and y.stride(-2) == 1  # a transposed view needs no copy
        out = new_floats(*x.shape[:-1], y.shape[-1])
        sizes = dict(matrices=math.prod(x.shape[:-2]), rows=x.shape[-2], inner=x.shape[-1], columns=y.shape[-1])
        tensors = dict(x=floats(x), y=floats(y.mT if turned else y), out=out)
        self._run("matmul", abi.MatmulArgs(**sizes, transposed=turned, **tensors))
        return out

    def second_moment(self, x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
        batch, heads, _, dim = x.shape
        moment = torch.empty(batch, heads, dim, dim, dtype=torch.double)
        tensors = dict(x=x, counted=counted, moment=moment)
        self._run("second_moment", abi.MomentArgs(shape=abi.Shape.of(x), **tensors, centred=centred, dtype=x.dtype))
        return moment

    def row_peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        peaks, finite = new_floats(*x.shape[:3]), torch.empty(x.shape[:3], dtype=torch.bool)
        self._run("row_peaks", abi.PeaksArgs(shape=abi.Shape.of(x), x=x, peaks=peaks, finite=finite, dtype=x.dtype))
        return peaks, finite

    def _only_finite(self, x: Tensor) -> Tensor:
        x, finite = floats(x), c_int32()
        self._run("all_finite", abi.FiniteArgs(count=x.numel(), x=x, finite=addressof(finite)))
        return x if finite.value else super()._only_finite(x)

    def _eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        matrix = matrix.double().contiguous()
        vectors, values = torch.empty_like(matrix), torch.empty_like(matrix[..., 0].contiguous())
        size = matrix.shape[-1]
        count = values.numel() // max(1, size)
        self._run("eigh", abi.EigenArgs(count=count, size=size, matrix=matrix, values=values, vectors=vectors))
        return values, vectors.mT

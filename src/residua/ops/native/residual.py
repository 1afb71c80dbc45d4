"""The paper's residual fit, in the native library."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...types import ResidualFit
from ..constants import FEATURE_EPS, MAX_LEVERAGE, MIN_ENERGY
from . import abi
from .arguments import floats, new_floats, row_major, shape_of
from .library import NativeBase


class NativeResidual(NativeBase):
    """The paper's residual fit, and its use."""

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

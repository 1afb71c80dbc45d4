"""The paper's residual fit, in the native library."""

import math

import torch
from torch import Tensor

from ...types import ResidualFit
from ..constants import FEATURE_EPS, MAX_LEVERAGE, MIN_ENERGY
from . import abi
from .abi import floats, new_floats, row_major
from .library import NativeBase


class NativeResidual(NativeBase):
    """The paper's residual fit, and its use."""

    def fit_residual(
        self, x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
    ) -> ResidualFit:
        *heads, count, dim = x.shape
        rank = min(rank, count, dim) if subspace else dim
        left, right = new_floats(*heads, dim, rank), new_floats(*heads, rank, dim)
        bias, left_out = new_floats(*heads, dim), new_floats(*x.shape)
        sizes = dict(heads=math.prod(heads), rows=count, dim=dim, rank=rank, subspace=subspace)
        limits = dict(ridge=ridge, feature_eps=FEATURE_EPS, max_leverage=MAX_LEVERAGE, min_energy=MIN_ENERGY)
        tensors = dict(x=floats(x), residual=floats(residual), weights=floats(weights))
        fit = dict(left=left, right=right, bias=bias, left_out=left_out)
        self._run("fit_residual", abi.FitArgs(**sizes, **limits, **tensors, **fit))
        return ResidualFit(left, right, bias, left_out)

    def add_affine(self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        out = row_major(out.float())
        result = out if dtype == torch.float32 else torch.empty(out.shape, dtype=dtype)
        fit = dict(left=floats(left), right=floats(right), bias=floats(bias), rank=left.shape[-1])
        self._run("add_affine", abi.AffineArgs(shape=abi.Shape.of(out), x=out, out=result, **fit, out_dtype=dtype))
        return result

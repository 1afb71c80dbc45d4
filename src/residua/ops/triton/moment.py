"""Second moments of sampled rows, in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import head_start, load_rows
from .shapes import as_bytes, padded

MAX_DIM = 128


@triton.jit
def moment_kernel(
    X, COUNTED, OUT, H, M, strides, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, CENTRED: tl.constexpr
):
    """One program: one head. X [B, H, M, D] strided -> OUT [B, H, D, D] fp64: the mean of x^T x over the rows that are
    COUNTED [B, H, M] uint8, or all if that is None; x off their mean if CENTRED."""
    head = tl.program_id(0).to(tl.int64)
    X = head_start(X, strides, head, H)
    dims = tl.arange(0, BD)
    mean = tl.zeros([BD], tl.float32)
    count = tl.zeros([], tl.float32)
    # the mean of the rows
    if CENTRED:
        sums = tl.zeros([BM, BD], tl.float32)
        for first in tl.range(0, M, BM, num_stages=1):
            rows = first + tl.arange(0, BM)
            x, taken = _rows(X, COUNTED, strides, head, rows, dims, M, D)
            sums += x
            count += tl.sum(taken.to(tl.float32), 0)
        mean = tl.sum(sums, 0) / tl.maximum(count, 1.0)
        count = tl.zeros([], tl.float32)
    # the sum of products, BM rows at a time
    acc = tl.zeros([BD, BD], tl.float32)
    for first in tl.range(0, M, BM, num_stages=1):
        rows = first + tl.arange(0, BM)
        x, taken = _rows(X, COUNTED, strides, head, rows, dims, M, D)
        if CENTRED:
            x = tl.where(taken[:, None] & (dims < D)[None, :], x - mean[None, :], 0.0)
        elif X.dtype.element_ty != tl.float32:
            x = x.to(X.dtype.element_ty)  # products of 16 bits are exact
        acc = tl.dot(tl.trans(x), x, acc, input_precision="tf32x3")
        count += tl.sum(taken.to(tl.float32), 0)
    acc = acc / tl.maximum(count, 1.0)
    inside = (dims < D)[:, None] & (dims < D)[None, :]
    tl.store(OUT + head * D * D + dims[:, None] * D + dims[None, :], acc.to(tl.float64), mask=inside)


@triton.jit
def _rows(X, COUNTED, strides, head, rows, dims, M, D: tl.constexpr):
    """Rows in fp32, zeros where a row is not counted or not finite, and which rows are."""
    at = rows.to(tl.int64)
    x = load_rows(X, strides, at, dims, rows < M, D).to(tl.float32)
    taken = (tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 1) == 0) & (rows < M)
    if COUNTED is not None:
        taken = taken & (tl.load(COUNTED + head * M + at, mask=rows < M, other=0) != 0)
    return tl.where(taken[:, None], x, 0.0), taken


def second_moment(x: Tensor, counted: Tensor | None, centred: bool) -> Tensor | None:
    """x [B, H, M, D], counted [B, H, M] bool or None -> [B, H, D, D] fp64, the accuracy of fp32"""
    batch, heads, rows, dim = x.shape
    if dim > MAX_DIM:
        return None
    out = torch.empty(batch, heads, dim, dim, dtype=torch.float64, device=x.device)
    if out.numel():
        sizes = (heads, rows, x.stride())
        blocks = {"D": dim, "BM": 16, "BD": padded(dim), "CENTRED": centred}
        moment_kernel[(batch * heads,)](x, as_bytes(counted), out, *sizes, **blocks, num_warps=8, num_stages=1)
    return out

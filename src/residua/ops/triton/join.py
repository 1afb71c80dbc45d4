"""Attention over the union of two sets of keys, in place: one result in the original order of the rows, the
other in that of their groups."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .device_functions import row_block
from .shapes import cdiv, padded


@triton.jit
def join_kernel(OUT, LSE, OTHER, OTHER_LSE, ORDER, N, tiles, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """One program: BM rows of OTHER [H, N, D] and OTHER_LSE [H, N], and the rows of OUT [H, N, D] and LSE [H, N] fp32
    at ORDER [H, N] int64, which are changed. Both are weighted by their share of the joint softmax total."""
    head, here = row_block(tiles, BM)
    live = here < N
    dims = tl.arange(0, BD)
    there = tl.load(ORDER + head * N + here, mask=live, other=0)
    LSE += head * N + there
    OUT += (head * N + there)[:, None] * D + dims[None, :]
    # weights relative to the larger log-sum-exp
    a = tl.load(LSE, mask=live, other=-float("inf"))
    b = tl.load(OTHER_LSE + head * N + here, mask=live, other=-float("inf"))
    top = tl.where((a > b) | (a != a), a, b)  # NaN stays
    safe = tl.where(top == -float("inf"), 0.0, top)
    weight_a = tl.exp(a - safe)
    weight_b = tl.exp(b - safe)
    total = weight_a + weight_b
    inside = live[:, None] & (dims < D)[None, :]
    # a row without keys may hold anything
    x = tl.load(OUT, mask=inside & (a != -float("inf"))[:, None], other=0.0).to(tl.float32)
    other = OTHER + (head * N + here)[:, None] * D + dims[None, :]
    y = tl.load(other, mask=inside & (b != -float("inf"))[:, None], other=0.0).to(tl.float32)
    joined = (x * weight_a[:, None] + y * weight_b[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(OUT, joined.to(OUT.dtype.element_ty), mask=inside)
    tl.store(LSE, safe + tl.log(total), mask=live)


def join_rows(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, order: Tensor) -> Tensor:
    """Changes out [H, N, D] and its natural log-sum-exp lse [H, N], fp32, to what they are over the keys of both, and
    returns out. Row n of `other` and `other_lse` belongs to row order[n]. All contiguous."""
    heads, count, dim = out.shape
    rows = 32
    tiles = cdiv(count, rows)
    if out.numel():
        tensors = (out, lse, other.contiguous(), other_lse.contiguous(), order.contiguous())
        join_kernel[(heads * tiles,)](*tensors, count, tiles, D=dim, BM=rows, BD=padded(dim))
    return out

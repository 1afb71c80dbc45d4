"""What kernels share inside a program: constants, addresses and loads, products that keep the digits of fp32, and
the online softmax."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))  # from natural logits to those of exp2
LN_2 = tl.constexpr(math.log(2))  # and back
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # the lowest fp32 that is finite


@triton.jit
def row_block(tiles, BN: tl.constexpr):
    """The head of this program, counted over the batch, and its BN rows, where a head has `tiles` programs."""
    pid = tl.program_id(0)
    return (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64) * BN + tl.arange(0, BN)


@triton.jit
def head_start(X, strides, head, H):
    """Where head `head`, counted over the batch, begins in a strided X [B, H, N, D]."""
    return X + (head // H * strides[0] + head % H * strides[1])


@triton.jit
def kv_head_of(head, H, heads_per_kv):
    """The K/V head of query head `head`, both counted over the batch."""
    return head // H * (H // heads_per_kv) + head % H // heads_per_kv


@triton.jit
def group_ends(OFFSETS, group, head):
    """Where group `group`, counted over all heads, begins and ends. A head has C groups and C + 1 offsets."""
    return tl.load(OFFSETS + group + head).to(tl.int32), tl.load(OFFSETS + group + head + 1).to(tl.int32)


@triton.jit
def load_rows(X, strides, rows, cols, live, D):
    """Rows [BN] of one head of a strided X [B, H, N, D]; zeros where not `live` [BN], and past column D."""
    at = X + rows[:, None] * strides[2] + cols[None, :] * strides[3]
    return tl.load(at, mask=live[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def load_matrix(X, rows, cols, height, width):
    """Entries [rows, cols] of a contiguous [height, width]; zeros outside of it."""
    at = X + rows[:, None] * width + cols[None, :]
    return tl.load(at, mask=(rows < height)[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit
def store_rows(OUT, rows, cols, x, live, width):
    """Stores x [BN, BD] as rows `rows`, where `live` [BN], of a contiguous OUT [N, width] at columns `cols`."""
    at = OUT + rows[:, None] * width + cols[None, :]
    tl.store(at, x.to(OUT.dtype.element_ty), mask=live[:, None] & (cols < width)[None, :])


@triton.jit
def add_product(a, b, acc, PARTS: tl.constexpr, PRECISION: tl.constexpr = "tf32x3"):
    """acc + a @ b for an fp32 `a`. Two parts of 16 bits hold 16 of its digits, three hold all: at half the
    price of three TF32 products, and without a cast of b. PRECISION is for a `b` of fp32."""
    if b.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        for _ in tl.static_range(PARTS):
            part = a.to(b.dtype)
            acc = tl.dot(part, b, acc)
            a -= part.to(tl.float32)
    return acc


@triton.jit
def finite_fp16(x):
    """x [..] fp32 in the range of fp16: what is not finite counts as 0."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return tl.minimum(tl.maximum(x, -60000.0), 60000.0)


@triton.jit
def softmax_step(scores, scale, top, total):
    """One tile of keys in the online softmax. `scores` [BM, BN] times `scale` > 0 are base-2 logits, -inf for keys
    that are not there; the product is part of the exponent's own multiply-add.

    `top` and `total` [BM] are the running maximum (of the logits) and sum -> weights [BM, BN], the factor by which
    everything before them is rescaled [BM], and both of them anew.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    # a tile of nothing but -inf must not turn into NaN through -inf - -inf
    safe = tl.maximum(new_top, LOWEST)
    p = tl.exp2(scores * scale - safe[:, None])
    rescale = tl.exp2(top - safe)
    return p, rescale, new_top, total * rescale + tl.sum(p, 1)


@triton.jit
def attend_tile(scores, scale, v, top, total, acc, PRECISION: tl.constexpr):
    """`softmax_step`, and the tile's values added to `acc` [BM, BD], the running weighted values."""
    p, rescale, top, total = softmax_step(scores, scale, top, total)
    return top, total, tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

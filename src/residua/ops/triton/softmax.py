"""The step of the online softmax that the attention kernels share."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from .constants import LOWEST


@triton.jit
def weigh(scores, scale, top, total):
    """Weights of one tile of keys. `scores` [BM, BN] times `scale` > 0 are base-2 logits, -inf for keys that
    are not there; the product is part of the exponent's own multiply-add.

    `top` and `total` [BM] are the running maximum (of the logits) and sum -> weights [BM, BN], by how much
    everything before them fades [BM], both of them anew.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    # a tile of nothing but -inf must not turn into NaN through -inf - -inf
    safe = tl.maximum(new_top, LOWEST)
    p = tl.exp2(scores * scale - safe[:, None])
    fade = tl.exp2(top - safe)
    return p, fade, new_top, total * fade + tl.sum(p, 1)


@triton.jit
def fold(scores, scale, v, top, total, acc, PRECISION: tl.constexpr):
    """Adds one tile of keys: `weigh`, and `acc` [BM, BD], the running weighted values."""
    p, fade, top, total = weigh(scores, scale, top, total)
    return top, total, tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)

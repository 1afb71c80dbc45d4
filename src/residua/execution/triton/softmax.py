"""The step of the online softmax that the attention kernels share."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(scores, scale, v, top, total, acc, PRECISION: tl.constexpr):
    """Adds one tile of keys. `scores` [BM, BN] times `scale` > 0 are base-2 logits, -inf for keys that are
    not there; the product is part of the exponent's own multiply-add.

    `top` and `total` [BM] are the running maximum (of the logits) and sum, `acc` [BM, BD] the running
    weighted values.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    # a tile of nothing but -inf must not turn into NaN through -inf - -inf
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(scores * scale - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return new_top, total, acc

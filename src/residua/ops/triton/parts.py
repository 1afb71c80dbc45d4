"""Products that keep the digits of fp32 although one factor has 16 bits."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


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

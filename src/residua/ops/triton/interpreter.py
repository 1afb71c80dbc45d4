"""A correction of Triton's interpreter, which multiplies bf16 operands by their bit patterns."""

from __future__ import annotations

from functools import wraps
from typing import Any


def widen_bf16_products() -> None:
    """Lets the interpreter's `tl.dot` see bf16 operands as the fp32 numbers that they stand for. Products of
    two bf16 numbers are exact in fp32, as on a GPU."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.create_dot
    if getattr(original, "widens_bf16", False):
        return

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    @wraps(original)
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widened(a), widened(b), *rest)

    create_dot.widens_bf16 = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot

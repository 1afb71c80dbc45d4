"""Numbers that kernels share with each other and with the Python side, by name."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from ...types import Choice

LOG2_E = tl.constexpr(math.log2(math.e))  # from natural logits to those of exp2
LN_2 = tl.constexpr(math.log(2))  # and back
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # the lowest fp32 that is finite
SPLIT_BITS = tl.constexpr(8)  # of each number in the word of a cut tile
SPLIT_MASK = tl.constexpr((1 << 8) - 1)
WITH_DRIFT = tl.constexpr(int(Choice.WITH_DRIFT))
WITHOUT_DRIFT = tl.constexpr(int(Choice.WITHOUT_DRIFT))

"""Corrected outputs must not leave the range of the call's dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an output is corrected: in fp16 a correction could overflow, where dense attention,
    a mean of the values, cannot."""
    return torch.float32 if dtype == torch.float16 else dtype


def narrow(out: Tensor, dtype: torch.dtype) -> Tensor:
    """A corrected output in its final dtype; finite values stay finite, Inf stays Inf."""
    if dtype != torch.float16:
        return out.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(out.isinf(), out, out.clamp(-limit, limit)).to(dtype)

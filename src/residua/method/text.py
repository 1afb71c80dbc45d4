"""What text takes of a call, because exact rows and pinned keys are computed whatever else is skipped, and
what a density leaves beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Call

TINY = 1e-12
# The part of a fixed density that text always leaves for the pairs that may be skipped
# (docs/decisions/0019-text-and-a-fixed-density.md).
LEFT_BY_TEXT = 0.5


def text_share(call: Call) -> Tensor | float:
    """The part of all pairs that exact rows and pinned keys (text tokens) take, whatever else is skipped.

    -> a number, or [B, 1] fp64 under a key mask
    """
    if call.key_mask is None:
        return text_share_by_shapes(call)
    rows, exact = call.q.shape[2], call.exact_queries.count
    pinned = (call.valid_pinned_keys.double() / call.valid_keys.clamp(min=1))[:, None]
    return (exact + (rows - exact) * pinned) / max(1, rows)


def text_share_by_shapes(call: Call) -> float:
    """`text_share` with padding counted as if it were valid: known without waiting for the device."""
    return share_of_text(call.q.shape[2], call.k.shape[2], call.exact_queries.count, call.pinned_keys.count)


def share_of_text(queries: int, keys: int, exact: int, pinned: int) -> float:
    """The part of all pairs that lie in one of the exact rows or hold one of the pinned keys."""
    return (exact + (queries - exact) * pinned / max(1, keys)) / max(1, queries)


def of_whole_call(call: Call, density: Tensor) -> Tensor:
    """A density of the pairs that may be skipped, as a density of the whole call.  # [B, H] fp64"""
    taken = text_share(call)
    return taken + (1 - taken) * density


def of_skippable(call: Call, density: Tensor) -> Tensor:
    """The reverse of `of_whole_call`."""
    taken = text_share(call)
    free = max(1 - taken, TINY) if isinstance(taken, float) else (1 - taken).clamp(min=TINY)
    return (density - taken) / free


def left_by_text(density: float, taken: float) -> float:
    """What a fixed density leaves, as a density of the pairs that may be skipped.

    Args:
        density: Of the whole call.
        taken: The part of its pairs that text takes.
    """
    return max(LEFT_BY_TEXT * density, (density - taken) / max(1 - taken, TINY))


def with_text(call: Call, density: Tensor) -> Tensor:
    """What a fixed density allows the whole call: more than `density` if text takes more than half of it.

    density [B, H] -> [B, H] fp64
    """
    if not call.exact_queries.count and not call.pinned_keys.count:
        return density
    return torch.maximum(density, of_whole_call(call, LEFT_BY_TEXT * density))

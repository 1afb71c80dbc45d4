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


def held_share(call: Call) -> Tensor | float:
    """The part of all pairs that exact rows and pinned keys (text tokens) take, whatever else is skipped.

    -> a number, or [B, 1] fp64 under a key mask
    """
    if call.key_mask is None:
        return held_by_shapes(call)
    rows, exact = call.q.shape[2], call.exact_queries.count
    pinned = (call.valid_pinned_keys.double() / call.valid_keys.clamp(min=1))[:, None]
    return (exact + (rows - exact) * pinned) / max(1, rows)


def held_by_shapes(call: Call) -> float:
    """`held_share` with padding counted as if it were valid: known without waiting for the device."""
    return share_held(call.q.shape[2], call.k.shape[2], call.exact_queries.count, call.pinned_keys.count)


def share_held(queries: int, keys: int, exact: int, pinned: int) -> float:
    """The part of all pairs that lie in one of the exact rows or hold one of the pinned keys."""
    return (exact + (queries - exact) * pinned / max(1, keys)) / max(1, queries)


def beside_held(call: Call, density: Tensor) -> Tensor:
    """A density of the pairs that may be skipped, as a density of the whole call.  # [B, H] fp64"""
    held = held_share(call)
    return held + (1 - held) * density


def without_held(call: Call, density: Tensor) -> Tensor:
    """The reverse of `beside_held`."""
    held = held_share(call)
    free = max(1 - held, TINY) if isinstance(held, float) else (1 - held).clamp(min=TINY)
    return (density - held) / free


def left_by_text(density: float, held: float) -> float:
    """What a fixed density leaves, as a density of the pairs that may be skipped.

    Args:
        density: Of the whole call.
        held: The part of its pairs that text takes.
    """
    return max(LEFT_BY_TEXT * density, (density - held) / max(1 - held, TINY))


def with_text(call: Call, density: Tensor) -> Tensor:
    """What a fixed density allows the whole call: more than `density` if text takes more than half of it.

    density [B, H] -> [B, H] fp64
    """
    if not call.exact_queries.count and not call.pinned_keys.count:
        return density
    return torch.maximum(density, beside_held(call, LEFT_BY_TEXT * density))

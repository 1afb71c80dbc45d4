"""Balanced budgets: one total for the heads of a call, moved to where the error is (`Config.balance`)."""

from __future__ import annotations

from torch import Tensor

from .common import MAX_STEP, TINY, finite_error

GAIN = 0.5  # with which power of its relative error a head's budget is multiplied
PASSES = 4  # of clipping and rescaling


def next_budget(spent: Tensor, error: Tensor, floor: Tensor, *, mean: float) -> Tensor:
    """What the next call may spend, with the same total.

    Args:
        spent: [B, H], what the heads might spend in this call.
        error: [B, H], their estimated errors.
        floor: Below which a reconstruction has nothing left to work with.
        mean: The mean over the heads.

    Returns:
        [B, H] fp64.
    """
    error = finite_error(error)
    relative = error / error.mean(-1, keepdim=True).clamp(min=TINY)
    wanted = spent * relative.clamp(min=TINY).pow(GAIN).clamp(1 / MAX_STEP, MAX_STEP)
    return share_out(wanted, mean, floor)


def share_out(wanted: Tensor, mean: float, floor: Tensor) -> Tensor:
    """The same proportions with that mean over the heads, within [`floor`, 1].  # [B, H]"""
    for _ in range(PASSES):
        wanted = (wanted * (mean / wanted.mean(-1, keepdim=True))).clamp(max=1.0).maximum(floor)
    over = wanted.mean(-1, keepdim=True) / mean
    return wanted / over.clamp(min=1.0)  # never more in all than was given

"""Budgets under an error bound: each head spends what keeps its estimated error below `Config.max_error`."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import TINY, finite_error

MAX_STEP = 1.6  # by which a budget grows or shrinks from one call to the next
POWER = 1.5  # the error falls about with this power of the budget
SHARE = 1 / 4  # a head whose error at the ceiling is 1 / 16 of the bound gets half of the ceiling


def next_budget(
    spent: Tensor, error: Tensor, dense: Tensor, floor: Tensor, *, ceiling: float, bound: float
) -> Tensor:
    """What the next call may spend. Not what just keeps the bound: an easy head would then be made as bad as
    the worst one may be.

    Args:
        spent: [B, H], what the heads might spend in this call.
        error: [B, H], their estimated errors.
        dense: [B, H] bool, heads that ran dense; they keep the ceiling.
        floor: Below which a reconstruction has nothing left to work with.
        ceiling: The most that a head may spend.
        bound: The error that is aimed at.

    Returns:
        [B, H] fp64.
    """
    at_ceiling = finite_error(error) * (spent / ceiling).pow(POWER)
    wanted = ceiling * (at_ceiling / bound).clamp(TINY, 1.0).pow(SHARE)
    wanted = torch.minimum(torch.maximum(wanted, spent / MAX_STEP), spent * MAX_STEP)
    return torch.where(dense, ceiling, torch.maximum(wanted, floor).clamp(max=ceiling))

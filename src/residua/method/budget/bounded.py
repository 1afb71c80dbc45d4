"""Budgets under an error bound: each head spends enough to keep its estimated error below `Config.max_error`."""

import torch
from torch import Tensor

MAX_STEP = 1.6  # most by which a budget grows or shrinks from one call to the next
POWER = 1.5  # the error falls roughly with this power of the budget
SHARE = 1 / 4  # a head whose error at the ceiling is 1 / 16 of the bound gets half of the ceiling
TINY = 1e-12  # errors and norms below it count as it


def next_budget(spent: Tensor, error: Tensor, minimum: Tensor, *, ceiling: float, bound: float) -> Tensor:
    """What the next call may spend. A head with a small error gets less, but more than would just keep the
    bound: otherwise easy heads would become as bad as the bound allows.

    spent [B, H], what the heads were allowed to spend in this call; error [B, H], what they were estimated to have, or
    would have had if they ran dense; minimum, below which a reconstruction does not work -> [B, H] fp64
    """
    at_ceiling = finite_error(error) * (spent / ceiling).pow(POWER)
    wanted = ceiling * (at_ceiling / bound).clamp(TINY, 1.0).pow(SHARE)
    wanted = torch.minimum(torch.maximum(wanted, spent / MAX_STEP), spent * MAX_STEP)
    return torch.maximum(wanted, minimum).clamp(max=ceiling)


def finite_error(error: Tensor) -> Tensor:
    """Estimated errors in fp64; one that is not finite counts as 1, so that its head gets more."""
    return torch.nan_to_num(error.double(), nan=1.0, posinf=1.0)

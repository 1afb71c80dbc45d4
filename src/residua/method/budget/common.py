"""What the rules for budgets have in common."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-12


def finite_error(error: Tensor) -> Tensor:
    """Estimated errors in fp64; one that is not finite counts as 1, so that its head gets more."""
    return torch.nan_to_num(error.double(), nan=1.0, posinf=1.0)

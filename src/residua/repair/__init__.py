"""What stands for the pairs that are skipped: the repairs, each a registered class."""

from .anchored import Anchored, Tail
from .base import REPAIRS, Plan, Repair, Work, register
from .fit import Fit, apply, estimate_error, fit
from .probe import ProbeFit

__all__ = [
    "REPAIRS", "Anchored", "Fit", "Plan", "ProbeFit", "Repair", "Tail", "Work", "apply", "estimate_error",
    "fit", "register",
]  # fmt: skip

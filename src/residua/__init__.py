"""Residua: training-free sparse attention for video diffusion transformers. Implements SparsePR."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .accounting import Pairs, Receipt
from .attention import attention
from .config import Config
from .errors import BackendError, InputError, IntegrationError, PlanError, ResiduaError
from .state import State
from .types import ExtraKeys, Partition, Route

if TYPE_CHECKING:
    from .diffusers import accelerate

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Config",
    "ExtraKeys",
    "InputError",
    "IntegrationError",
    "Pairs",
    "Partition",
    "PlanError",
    "Receipt",
    "ResiduaError",
    "Route",
    "State",
    "accelerate",
    "attention",
]


def __getattr__(name: str) -> Any:
    # diffusers takes seconds to import and is optional: only who asks for it pays for it
    if name == "accelerate":
        from .diffusers import accelerate

        return accelerate
    raise AttributeError(f"module 'residua' has no attribute {name!r}")

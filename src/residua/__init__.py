"""Residua: training-free sparse attention for video diffusion transformers. Implements SparsePR."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from typing import Any as _Any

from .accounting import Pairs, Receipt
from .attention import attention
from .config import Config
from .errors import BackendError, InputError, IntegrationError, ResiduaError, RouteError
from .sdpa import sdpa
from .state import State
from .types import Partition, Route, SummaryKeys

if TYPE_CHECKING:
    from .diffusers import accelerate

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Config",
    "InputError",
    "IntegrationError",
    "Pairs",
    "Partition",
    "Receipt",
    "ResiduaError",
    "Route",
    "RouteError",
    "State",
    "SummaryKeys",
    "accelerate",
    "attention",
    "sdpa",
]

logging.getLogger("residua").addHandler(logging.NullHandler())  # silent until the user configures logging

_RENAMED = {"ExtraKeys": "SummaryKeys", "PlanError": "RouteError"}


def __getattr__(name: str) -> _Any:
    # diffusers takes seconds to import and is optional: only who asks for it pays for it
    if name == "accelerate":
        from .diffusers import accelerate

        return accelerate
    if name in _RENAMED:
        raise AttributeError(f"residua.{name} is now called residua.{_RENAMED[name]}")
    raise AttributeError(f"module 'residua' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

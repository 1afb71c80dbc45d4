"""Residua: training-free sparse attention for video diffusion transformers. Implements SparsePR."""

import importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

from .errors import BackendError, InputError, IntegrationError, ResiduaError, RouteError

if TYPE_CHECKING:
    from .api import attention, sdpa
    from .config import Config
    from .hosts.diffusers.accelerate import accelerate
    from .receipt import Pairs, Receipt
    from .state import State
    from .types import Partition, Route, SummaryKeys

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

# Public name -> the module that defines it. Imported on first use: importing torch takes seconds, diffusers
# longer, and `residua --help` needs neither.
_HOME = {
    "Config": "config",
    "Pairs": "receipt",
    "Partition": "types",
    "Receipt": "receipt",
    "Route": "types",
    "State": "state",
    "SummaryKeys": "types",
    "accelerate": "hosts.diffusers",
    "attention": "api",
    "sdpa": "api",
}


def __getattr__(name: str) -> _Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'residua' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

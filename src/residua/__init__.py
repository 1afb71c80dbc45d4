"""Residua: training-free sparse attention for video diffusion transformers. Implements SparsePR."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING
from typing import Any as _Any

from .errors import BackendError, InputError, IntegrationError, ResiduaError, RouteError

if TYPE_CHECKING:
    from .accounting import Pairs, Receipt
    from .attention import attention
    from .config import Config
    from .diffusers.accelerate import accelerate
    from .sdpa import sdpa
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
    "Config": "config", "Pairs": "accounting", "Partition": "types", "Receipt": "accounting",
    "Route": "types", "State": "state", "SummaryKeys": "types", "accelerate": "diffusers",
    "attention": "attention", "sdpa": "sdpa",
}  # fmt: skip
_RENAMED = {"ExtraKeys": "SummaryKeys", "PlanError": "RouteError"}


def __getattr__(name: str) -> _Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _RENAMED:
        raise AttributeError(f"residua.{name} is now called residua.{_RENAMED[name]}")
    raise AttributeError(f"module 'residua' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(_ModuleType):
    """Keeps `residua.attention` and `residua.sdpa` functions. The package also has modules of these names,
    and importing one would otherwise replace the function."""

    @property
    def attention(self) -> _Any:
        return __getattr__("attention")

    @attention.setter
    def attention(self, module: _ModuleType) -> None:
        """Called by the import of the module; the function stays."""

    @property
    def sdpa(self) -> _Any:
        return __getattr__("sdpa")

    @sdpa.setter
    def sdpa(self, module: _ModuleType) -> None:
        """Called by the import of the module; the function stays."""


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Package

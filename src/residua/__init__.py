"""Residua: training-free sparse attention for video diffusion transformers. Implements SparsePR."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import BackendError, InputError, IntegrationError, PlanError, ResiduaError

if TYPE_CHECKING:
    from .accounting import Pairs, Receipt
    from .attention import attention
    from .config import Config
    from .diffusers import accelerate
    from .state import State
    from .types import ExtraKeys, Partition, Route

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

# Public name -> the module that has it. They are imported when somebody asks: torch takes seconds, diffusers
# more, and `residua --help` needs neither.
_HOME = {
    "Config": "config", "ExtraKeys": "types", "Pairs": "accounting", "Partition": "types",
    "Receipt": "accounting", "Route": "types", "State": "state", "accelerate": "diffusers",
    "attention": "attention",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'residua' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """`residua.attention` is the function, although a module of that name is part of the package: importing
    the module would otherwise put itself in the function's place."""

    @property
    def attention(self) -> Any:
        return __getattr__("attention")

    @attention.setter
    def attention(self, module: ModuleType) -> None:
        """Called by the import of the module; the function stays."""


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Package

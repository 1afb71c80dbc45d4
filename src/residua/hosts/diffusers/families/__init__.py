"""One small file per model family; each registers itself when this package is imported."""

import importlib
import pkgutil

from .base import Family, Grid, Preset, family_of, find_family, patch_of, patched_grid, register, supported

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Family", "Grid", "Preset", "family_of", "find_family", "patch_of", "patched_grid", "register", "supported"]

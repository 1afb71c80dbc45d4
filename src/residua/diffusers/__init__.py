"""Residua for diffusers: one call accelerates the self-attention of a video pipeline.

>>> handle = residua.accelerate(pipe, quality="balanced")   # doctest: +SKIP
"""

from ..integration import QUALITIES, Preset, Quality, Report
from .accelerate import accelerate, attached, preset_config
from .families import Family, Grid, patched_grid, register, supported
from .handle import Handle

__all__ = [
    "QUALITIES", "Family", "Grid", "Handle", "Preset", "Quality", "Report", "accelerate", "attached",
    "patched_grid", "preset_config", "register", "supported",
]  # fmt: skip

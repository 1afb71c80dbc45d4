"""Residua for diffusers: one call accelerates the self-attention of a video pipeline.

>>> handle = residua.accelerate(pipe, quality="balanced")   # doctest: +SKIP
"""

from .. import QUALITIES, Preset, Profile, Quality, Report
from .accelerate import accelerate, attached, model_facts, preset_config
from .families import Family, Grid, patch_of, patched_grid, register, supported
from .handle import Handle

__all__ = [
    "QUALITIES",
    "Family",
    "Grid",
    "Handle",
    "Preset",
    "Profile",
    "Quality",
    "Report",
    "accelerate",
    "attached",
    "model_facts",
    "patch_of",
    "patched_grid",
    "preset_config",
    "register",
    "supported",
]

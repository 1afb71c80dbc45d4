"""AnyFlow: Wan with a second timestep; its latents are [B, frames, C, height, width]. Its causal variant
(FAR) attends through block masks of its own and is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Grid, Preset, patched_grid, register
from .wan import Wan


@register
class AnyFlow(Wan):
    name = "AnyFlow"
    models = ("AnyFlowTransformer3DModel",)
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
    processors: Mapping[str, Any] = {"AnyFlowAttnProcessor": None}
    context_parallel = False

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"].transpose(1, 2), tuple(model.config.patch_size))

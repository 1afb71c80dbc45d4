"""HunyuanVideo and MotifVideo: joint attention over [video, text], with the text's padding masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, Preset, patched_grid, register


@register
class HunyuanVideo(Family):
    name = "HunyuanVideo"
    models = ("HunyuanVideoTransformer3DModel",)
    attention = r"(single_)?transformer_blocks\.\d+\.attn"
    preset = Preset(0.22, 0.10, 1, "the paper's density; the authors' dense steps and layers")
    processors: Mapping[str, Any] = {"HunyuanVideoAttnProcessor2_0": None}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        config = model.config
        return patched_grid(inputs["hidden_states"], (config.patch_size_t, config.patch_size, config.patch_size))


@register
class MotifVideo(HunyuanVideo):
    name = "MotifVideo"
    models = ("MotifVideoTransformer3DModel",)
    preset = Preset(0.22, 0.10, 1, "not in the paper; taken over from HunyuanVideo")
    processors: Mapping[str, Any] = {"MotifVideoAttnProcessor2_0": None}

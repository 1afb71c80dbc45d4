"""Cosmos3: a causal call over the text, then video queries over [text, video] keys with grouped K/V heads.
Sound and action tokens, if a model has them, follow the video."""

import math
from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, Preset, register


@register
class Cosmos3(Family):
    name = "Cosmos3"
    models = ("Cosmos3OmniTransformer",)
    attention = r"layers\.\d+\.self_attn"
    preset = Preset(0.26, 2, 1, "the paper's density; dense steps and layers taken over from Cosmos-Predict2.5")
    processors: Mapping[str, Any] = {"Cosmos3AttnProcessor": None}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        frames, height, width = inputs["vision_token_shapes"][0]
        return int(frames), int(height), int(width)

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        return sum(math.prod(shape) for shape in inputs["vision_token_shapes"])

    def video_start(self, queries: int, keys: int, video: int) -> tuple[int, int]:
        return 0, keys - queries

    def timestep(self, inputs: Mapping[str, Any]) -> Any:
        return inputs.get("vision_timesteps")

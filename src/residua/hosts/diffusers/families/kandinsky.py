"""Kandinsky 5 and 6: the whole sequence is video. Latents are [B, frames, height, width, C]. Calls with a
NABLA mask, which already selects blocks, are not changed."""

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, patch_of, patched_grid, register


@register
class Kandinsky5(Family):
    name = "Kandinsky 5"
    models = ("Kandinsky5Transformer3DModel",)
    attention = r"visual_transformer_blocks\.\d+\.self_attention"
    processors: Mapping[str, Any] = {"Kandinsky5AttnProcessor": None}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"].movedim(-1, 1), patch_of(model))


@register
class Kandinsky6(Kandinsky5):
    """Its audio has attention of its own, which is not changed."""

    name = "Kandinsky 6"
    models = ("Kandinsky6Transformer3DModel",)
    attention = r"visual_transformer_blocks\.\d+\.video_dec_block\.self_attention"
    processors: Mapping[str, Any] = {"Kandinsky6AttnProcessor": None}

"""Cosmos-Predict2.5 (and Cosmos 1 and 2, which share its transformer): the whole sequence is video. The
processor of diffusers passes no backend, so Residua has its own."""

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, Preset, patch_of, patched_grid, register
from .processor import OwnProcessor


class CosmosProcessor(OwnProcessor):
    rotary_unbind_dim = -2


@register
class Cosmos25(Family):
    name = "Cosmos-Predict2.5"
    models = ("CosmosTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    preset = Preset(0.22, 2, 1, "the paper's density; the authors' dense steps and layers")
    processors: Mapping[str, Any] = {"CosmosAttnProcessor2_0": CosmosProcessor}


@register
class CosmosControl(Cosmos25):
    """The ControlNet of Cosmos-Transfer2.5: its blocks are those of the transformer."""

    name = "Cosmos-Transfer2.5 ControlNet"
    models = ("CosmosControlNetModel",)
    attention = r"control_blocks\.\d+\.attn1"
    preset = Preset(0.22, 2, 1, "not in the paper; taken over from Cosmos-Predict2.5")

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["latents"], patch_of(model))

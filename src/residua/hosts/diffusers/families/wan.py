"""Wan 2.1 and 2.2 (text, image, both transformers of A14B), VACE, Animate, SkyReels-V2 and ChronoEdit: the
whole sequence is video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, Preset, patched_grid, register

NOT_IN_THE_PAPER = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")


@register
class Wan(Family):
    name = "Wan"
    models = ("WanTransformer3DModel",)
    attention = r"blocks\.\d+\.attn1"
    preset = Preset(0.22, 0.20, 0.03, "the paper's density; the authors' dense steps and layers for Wan2.2")
    processors: Mapping[str, Any] = {"WanAttnProcessor": None}
    context_parallel = True

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"], tuple(model.config.patch_size))


@register
class WanVACE(Wan):
    name = "Wan VACE"
    models = ("WanVACETransformer3DModel",)
    attention = r"(vace_)?blocks\.\d+\.attn1"
    preset = NOT_IN_THE_PAPER
    context_parallel = False

    def depth(self, model: Any, name: str, index: int) -> int:
        """A control block has the depth of the main block that it feeds."""
        number = int(name.split(".")[1])
        return int(model.config.vace_layers[number]) if name.startswith("vace_") else number


@register
class SkyReels(Wan):
    name = "SkyReels-V2"
    models = ("SkyReelsV2Transformer3DModel",)
    preset = NOT_IN_THE_PAPER
    processors: Mapping[str, Any] = {"SkyReelsV2AttnProcessor": None}
    context_parallel = False


@register
class WanAnimate(Wan):
    """Its face adapter is cross-attention and is not changed."""

    name = "Wan Animate"
    models = ("WanAnimateTransformer3DModel",)
    preset = NOT_IN_THE_PAPER
    context_parallel = False


@register
class ChronoEdit(Wan):
    name = "ChronoEdit"
    models = ("ChronoEditTransformer3DModel",)
    preset = NOT_IN_THE_PAPER
    context_parallel = False

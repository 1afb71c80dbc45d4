"""Wan 2.1 and 2.2 (text, image, both transformers of A14B) and models built on it: the whole sequence is video."""

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, Preset, patch_of, patched_grid, patches, register

HISTORY = {"short": 1, "mid": 2, "long": 4}  # patches of the video that one token of Helios covers, per axis


class WanLike(Family):
    attention = r"blocks\.\d+\.attn1"
    processors: Mapping[str, Any] = {"WanAttnProcessor": None}


@register
class Wan(WanLike):
    name = "Wan"
    models = ("WanTransformer3DModel",)
    preset = Preset(0.22, 0.20, 0.03, "the paper's density; the authors' dense steps and layers for Wan2.2")
    context_parallel = True


@register
class WanVACE(WanLike):
    name = "Wan VACE"
    models = ("WanVACETransformer3DModel",)
    attention = r"(vace_)?blocks\.\d+\.attn1"

    def depth(self, model: Any, name: str, index: int) -> int:
        """A control block has the depth of the main block that it feeds."""
        number = int(name.split(".")[1])
        return int(model.config.vace_layers[number]) if name.startswith("vace_") else number


@register
class SkyReels(WanLike):
    name = "SkyReels-V2"
    models = ("SkyReelsV2Transformer3DModel",)
    processors: Mapping[str, Any] = {"SkyReelsV2AttnProcessor": None}


@register
class WanAnimate(WanLike):
    """Its face adapter is cross-attention and is not changed."""

    name = "Wan Animate"
    models = ("WanAnimateTransformer3DModel",)


@register
class ChronoEdit(WanLike):
    name = "ChronoEdit"
    models = ("ChronoEditTransformer3DModel",)


@register
class AnyFlow(WanLike):
    """Wan with a second timestep; its latents are [B, frames, C, height, width]. Its causal variant (FAR) attends
    through block masks of its own and is not supported."""

    name = "AnyFlow"
    models = ("AnyFlowTransformer3DModel",)
    processors: Mapping[str, Any] = {"AnyFlowAttnProcessor": None}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return patched_grid(inputs["hidden_states"].transpose(1, 2), patch_of(model))


@register
class Helios(WanLike):
    """The sequence is [history, video]. The history, which is compressed more the older it is, counts as video."""

    name = "Helios"
    models = ("HeliosTransformer3DModel",)
    processors: Mapping[str, Any] = {"HeliosAttnProcessor": None}

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        tokens = super().tokens(model, inputs)
        for name, times in HISTORY.items():
            latents = inputs.get(f"latents_history_{name}")
            if latents is not None and inputs.get(f"indices_latents_history_{name}") is not None:
                tokens += patches(latents, tuple(times * step for step in model.config.patch_size))
        return tokens

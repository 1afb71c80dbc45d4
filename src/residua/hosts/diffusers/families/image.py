"""Image transformers with many tokens (2K and 4K pictures, editing with references): joint attention over
[text, image]. A picture is a video of one frame."""

from collections.abc import Mapping
from typing import Any

from ...site import Ranges
from .base import IMAGE_PRESET, Family, Grid, register

IMAGE_PROMPT = "image prompt (IP-Adapter)"


class TextThenImage(Family):
    """The image (with its references) comes last."""

    preset = IMAGE_PRESET
    text_first = True

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return 1, 1, self.tokens(model, inputs)

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        return int(inputs["hidden_states"].shape[1])


@register
class Flux(TextThenImage):
    name = "Flux.1"
    models = ("FluxTransformer2DModel",)
    attention = r"(single_)?transformer_blocks\.\d+\.attn"
    processors: Mapping[str, Any] = {"FluxAttnProcessor": None, "FluxIPAdapterAttnProcessor": None}

    def why_dense(self, queries: int, keys: int) -> str | None:
        return None if queries == keys else IMAGE_PROMPT


@register
class FluxControl(Flux):
    """Its blocks are those of the transformer, like those of QwenImageControl."""

    name = "Flux.1 ControlNet"
    models = ("FluxControlNetModel",)


@register
class Flux2(TextThenImage):
    name = "Flux.2"
    models = ("Flux2Transformer2DModel",)
    attention = r"(single_)?transformer_blocks\.\d+\.attn"
    processors: Mapping[str, Any] = {
        "Flux2AttnProcessor": None,
        "Flux2ParallelSelfAttnProcessor": None,
        "Flux2KVAttnProcessor": None,
        "Flux2KVParallelSelfAttnProcessor": None,
    }

    def layout(self, model: Any, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """The number of text tokens, and of references that attend to themselves alone (the first step of the
        pipeline that keeps their keys)."""
        return int(inputs["encoder_hidden_states"].shape[1]), int(inputs.get("num_ref_tokens") or 0)

    def text(self, queries: int, keys: int, video: int, layout: tuple[int, int]) -> tuple[Ranges, Ranges]:
        """Text comes first. With kept references there are more keys than queries."""
        text, references = layout
        if references and queries == keys == references:
            return (), ()
        return ((0, text),), ((0, text),)


@register
class QwenImage(TextThenImage):
    name = "Qwen-Image"
    models = ("QwenImageTransformer2DModel",)
    attention = r"transformer_blocks\.\d+\.attn"
    processors: Mapping[str, Any] = {"QwenDoubleStreamAttnProcessor2_0": None}


@register
class QwenImageControl(QwenImage):
    name = "Qwen-Image ControlNet"
    models = ("QwenImageControlNetModel",)

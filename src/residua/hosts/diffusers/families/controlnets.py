"""ControlNets of image transformers: their blocks are those of the transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Grid, register
from .image import Flux, QwenImage
from .sd3 import SD3
from .z_image import ZImage


@register
class FluxControl(Flux):
    name = "Flux.1 ControlNet"
    models = ("FluxControlNetModel",)


@register
class QwenImageControl(QwenImage):
    name = "Qwen-Image ControlNet"
    models = ("QwenImageControlNetModel",)


@register
class SD3Control(SD3):
    name = "SD3.5 ControlNet"
    models = ("SD3ControlNetModel",)

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        latents = inputs["hidden_states"]
        # Those for the 8B model get what the transformer made of the latents: [B, N, C].
        return super().grid(model, inputs) if latents.ndim == 4 else (1, 1, int(latents.shape[1]))


@register
class ZImageControl(ZImage):
    """It also runs the transformer's noise refiner, whose calls stay dense there."""

    name = "Z-Image ControlNet"
    models = ("ZImageControlNetModel",)
    attention = r"control_(noise_refiner|layers)\.\d+\.attention"

"""Z-Image: the image alone in the noise refiner, then joint attention over [image, text]."""

import math
from collections.abc import Mapping
from typing import Any

from ....errors import IntegrationError
from .base import IMAGE_PRESET, Family, Grid, patched_grid, register

DEFAULT_PATCH = {"patch_size": 2, "f_patch_size": 1}


@register
class ZImage(Family):
    name = "Z-Image"
    models = ("ZImageTransformer2DModel",)
    attention = r"(noise_refiner|layers)\.\d+\.attention"
    preset = IMAGE_PRESET
    processors: Mapping[str, Any] = {"ZSingleStreamAttnProcessor": None}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        """The grid of the smallest picture in the batch: tokens of larger pictures beyond it are exact, like
        text."""
        images = inputs["x"]
        if isinstance(images[0], (list, tuple)):
            raise IntegrationError(
                "Z-Image: got lists of pictures (the Omni pipeline), wanted one picture per sample; remove() Residua"
            )
        height, frames = (int(inputs.get(name, size)) for name, size in DEFAULT_PATCH.items())
        return min((patched_grid(image[None], (frames, height, height)) for image in images), key=math.prod)

    def timestep(self, inputs: Mapping[str, Any]) -> Any:
        return inputs.get("t")


@register
class ZImageControl(ZImage):
    """Its blocks are those of the transformer. It also runs the transformer's noise refiner, whose calls stay dense
    there."""

    name = "Z-Image ControlNet"
    models = ("ZImageControlNetModel",)
    attention = r"control_(noise_refiner|layers)\.\d+\.attention"

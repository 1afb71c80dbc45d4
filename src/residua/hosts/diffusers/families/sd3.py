"""Stable Diffusion 3 and 3.5: joint attention over [image, text]; SD3.5 also has attention over the image
alone. Both call torch directly."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .base import IMAGE_PRESET, Family, Grid, register
from .processor import OwnProcessor, project_out


class JointProcessor(OwnProcessor):
    def compute(self, attn: Any, video: Tensor, text: Tensor | None, mask: Any, rotary: Any) -> Any:
        """Ignores the mask, like diffusers."""
        if text is None:
            return super().compute(attn, video, text, None, rotary)
        video, text = self.attend_joint(attn, video, text)
        return project_out(attn, video), text if attn.context_pre_only else attn.to_add_out(text)


@register
class SD3(Family):
    name = "SD3.5"
    models = ("SD3Transformer2DModel",)
    attention = r"transformer_blocks\.\d+\.attn2?"
    preset = IMAGE_PRESET
    # Not the fused one: in diffusers it leaves out the norms and the attention over the image alone.
    processors: Mapping[str, Any] = {"JointAttnProcessor2_0": JointProcessor}

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        height, width = inputs["hidden_states"].shape[-2:]
        return 1, height // model.config.patch_size, width // model.config.patch_size

    def depth(self, model: Any, name: str, index: int) -> int:
        """The two attentions of a block are at the same depth."""
        return int(name.split(".")[1])


@register
class SD3Control(SD3):
    """Its blocks are those of the transformer."""

    name = "SD3.5 ControlNet"
    models = ("SD3ControlNetModel",)

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        latents = inputs["hidden_states"]
        # Those for the 8B model get what the transformer made of the latents: [B, N, C].
        return super().grid(model, inputs) if latents.ndim == 4 else (1, 1, int(latents.shape[1]))

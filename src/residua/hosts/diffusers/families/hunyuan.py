"""HunyuanVideo, its successors and MotifVideo: joint attention over [video, text], with the text's padding masked."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .base import Family, Preset, patches, register
from .processor import OwnProcessor, project_out

NOT_IN_THE_PAPER = Preset(0.22, 0.10, 1, "not in the paper; taken over from HunyuanVideo")
# Latents per token of the history of FramePack.
HISTORY = {"latents_clean": (1, 2, 2), "latents_history_2x": (2, 4, 4), "latents_history_4x": (4, 8, 8)}


@register
class HunyuanVideo(Family):
    name = "HunyuanVideo"
    models = ("HunyuanVideoTransformer3DModel",)
    attention = r"(single_)?transformer_blocks\.\d+\.attn"
    preset = Preset(0.22, 0.10, 1, "the paper's density; the authors' dense steps and layers")
    processors: Mapping[str, Any] = {"HunyuanVideoAttnProcessor2_0": None}


@register
class MotifVideo(HunyuanVideo):
    name = "MotifVideo"
    models = ("MotifVideoTransformer3DModel",)
    preset = NOT_IN_THE_PAPER
    processors: Mapping[str, Any] = {"MotifVideoAttnProcessor2_0": None}


@register
class FramePack(HunyuanVideo):
    """Attention over [history, video, image and text]. The history frames, which are compressed more the older they
    are, count as video."""

    name = "HunyuanVideo FramePack"
    models = ("HunyuanVideoFramepackTransformer3DModel",)
    preset = NOT_IN_THE_PAPER

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        return super().tokens(model, inputs) + sum(
            patches(inputs[name], patch) for name, patch in HISTORY.items() if inputs.get(name) is not None
        )


class HunyuanVideo15Processor(OwnProcessor):
    """The processor of diffusers builds an N x N mask (12.5 GB per call at 111,600 tokens); this one passes only the
    key padding. The mask of diffusers also zeroes the rows of padded text. Nothing reads those rows, because their
    keys are masked."""

    def compute(self, attn: Any, video: Tensor, text: Tensor, mask: Any, rotary: Any) -> tuple[Tensor, Tensor]:
        video, text = self.attend_joint(attn, video, text, rotary, mask)
        return project_out(attn, video), attn.to_add_out(text)


@register
class HunyuanVideo15(HunyuanVideo):
    name = "HunyuanVideo-1.5"
    models = ("HunyuanVideo15Transformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn"
    preset = NOT_IN_THE_PAPER
    processors: Mapping[str, Any] = {"HunyuanVideo15AttnProcessor2_0": HunyuanVideo15Processor}

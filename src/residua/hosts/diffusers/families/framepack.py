"""HunyuanVideo FramePack: joint attention over [history, video, image and text]. The history frames, which
are compressed more the older they are, count as video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Preset, patches, register
from .hunyuan import HunyuanVideo

HISTORY = {
    "latents_clean": (1, 2, 2),
    "latents_history_2x": (2, 4, 4),
    "latents_history_4x": (4, 8, 8),
}  # latents per token


@register
class FramePack(HunyuanVideo):
    name = "HunyuanVideo FramePack"
    models = ("HunyuanVideoFramepackTransformer3DModel",)
    preset = Preset(0.22, 0.10, 1, "not in the paper; taken over from HunyuanVideo")

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        return super().tokens(model, inputs) + sum(
            patches(inputs[name], patch) for name, patch in HISTORY.items() if inputs.get(name) is not None
        )

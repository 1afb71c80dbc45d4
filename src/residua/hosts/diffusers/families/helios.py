"""Helios: the sequence is [history, video]. The history, which is compressed more the older it is, counts as
video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Preset, patches, register
from .wan import Wan

HISTORY = {"short": 1, "mid": 2, "long": 4}  # patches of the video that one token covers, per axis


@register
class Helios(Wan):
    name = "Helios"
    models = ("HeliosTransformer3DModel",)
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
    processors: Mapping[str, Any] = {"HeliosAttnProcessor": None}
    context_parallel = False

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        tokens = super().tokens(model, inputs)
        for name, times in HISTORY.items():
            latents = inputs.get(f"latents_history_{name}")
            if latents is not None and inputs.get(f"indices_latents_history_{name}") is not None:
                tokens += patches(latents, tuple(times * step for step in model.config.patch_size))
        return tokens

"""LTX-Video and LTX-2: the sequence is video (with its conditioning frames). LTX-2's audio stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, Preset, register


@register
class LTX(Family):
    name = "LTX-Video"
    models = ("LTXVideoTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    preset = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
    processors: Mapping[str, Any] = {"LTXVideoAttnProcessor": None}
    context_parallel = True

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        sizes = [inputs.get(name) for name in ("num_frames", "height", "width")]
        if any(size is None for size in sizes):
            return 1, 1, self.tokens(model, inputs)
        frames, height, width = sizes
        return int(frames), int(height), int(width)  # type: ignore[arg-type]

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        # More than the grid when conditioning frames are appended; those are video too.
        return int(inputs["hidden_states"].shape[1])


@register
class LTX2(LTX):
    name = "LTX-2"
    models = ("LTX2VideoTransformer3DModel",)
    context_parallel = False  # diffusers' own dense Ulysses fails on it (tried with 0.42.1)
    processors: Mapping[str, Any] = {"LTX2AudioVideoAttnProcessor": None, "LTX2PerturbedAttnProcessor": None}

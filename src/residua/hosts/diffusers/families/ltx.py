"""LTX-Video and LTX-2: the sequence is video (with conditioning frames). LTX-2's audio is not changed."""

import weakref
from collections.abc import Mapping
from typing import Any

from .base import Family, Grid, register


@register
class LTX(Family):
    name = "LTX-Video"
    models = ("LTXVideoTransformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn1"
    processors: Mapping[str, Any] = {"LTXVideoAttnProcessor": None}
    context_parallel = True
    _coordinates: tuple[Any, Grid] | None = None  # weak reference to the last coordinates, and their grid

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        sizes = [inputs.get(name) for name in ("num_frames", "height", "width")]
        if any(size is None for size in sizes):
            return self._grid_of(inputs.get("video_coords"), self.tokens(model, inputs))
        frames, height, width = sizes
        return int(frames), int(height), int(width)  # type: ignore[arg-type]

    def _grid_of(self, places: Any, tokens: int) -> Grid:
        """From the coordinates [B, 3, N] that the conditioning pipeline passes instead of sizes. Read from
        the device once per run, because they do not change."""
        known = self._coordinates
        if places is not None and (known is None or known[0]() is not places):
            frames, height, width = (int(axis.unique().numel()) for axis in places[0])
            fits = frames * height * width == tokens
            known = (weakref.ref(places), (frames, height, width) if fits else (1, 1, tokens))
            self._coordinates = known
        return (1, 1, tokens) if places is None or known is None else known[1]

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        # More than the grid if conditioning frames are appended; those are video too.
        return int(inputs["hidden_states"].shape[1])


@register
class LTX2(LTX):
    name = "LTX-2"
    models = ("LTX2VideoTransformer3DModel",)
    context_parallel = False  # diffusers' own dense Ulysses fails on it (tried with 0.42.1)
    processors: Mapping[str, Any] = {"LTX2AudioVideoAttnProcessor": None, "LTX2PerturbedAttnProcessor": None}

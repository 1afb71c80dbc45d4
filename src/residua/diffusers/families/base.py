"""What Residua must know about a transformer, and the table of families that know it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import IntegrationError
from ...integration import Grid, Preset


class Family:
    """One model family. Subclass it, fill the class constants, answer `grid`, and decorate with
    `register`."""

    name: str
    models: tuple[str, ...]  # class names of the transformers
    attention: str  # regular expression: names of the self-attention modules
    preset: Preset
    # Attention processors of diffusers that are understood. None: it hands its backend to the dispatcher, so
    # a tagged copy is enough. A class: Residua's own version of it, which does.
    processors: Mapping[str, Any]
    context_parallel = False  # whether Ulysses leaves the tokens in the order that `video_start` tells

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        """The token grid of the video, from the arguments of the transformer's forward."""
        raise NotImplementedError

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        """How many tokens are video."""
        return math.prod(self.grid(model, inputs))

    def video_start(self, queries: int, keys: int, video: int) -> tuple[int, int]:
        """Where the video begins in the queries and in the keys of one call; everything else is pinned."""
        return 0, 0

    def timestep(self, inputs: Mapping[str, Any]) -> Any:
        return inputs.get("timestep")

    def depth(self, model: Any, name: str, index: int) -> int:
        """The layer's place from the input on, for `dense_layers`. `index` is its place in module order."""
        return index

    def layers(self, model: Any) -> Iterator[tuple[str, Any]]:
        """Names and modules of the self-attention layers, in module order."""
        pattern = re.compile(self.attention)
        return ((name, module) for name, module in model.named_modules() if pattern.fullmatch(name))


_FAMILIES: dict[str, Family] = {}  # class name of the transformer -> family


def register(family: type[Family]) -> type[Family]:
    """Class decorator: makes a family known. A later one replaces an earlier one for the same model."""
    instance = family()
    for model in family.models:
        _FAMILIES[model] = instance
    return family


def supported() -> dict[str, Family]:
    """Every known transformer class name with its family."""
    return dict(_FAMILIES)


def family_of(model: Any) -> Family:
    name = type(model).__name__
    if name not in _FAMILIES:
        raise IntegrationError(
            f"{name} is not a transformer that Residua knows; supported: {', '.join(sorted(_FAMILIES))}. "
            "docs/add-a-model.md shows how to add one in 30 lines"
        )
    return _FAMILIES[name]


def patched_grid(latents: Any, patch: tuple[int, int, int]) -> Grid:
    """The grid of latents [B, C, frames, height, width] cut into patches."""
    frames, height, width = (int(size) // step for size, step in zip(latents.shape[2:], patch, strict=True))
    return frames, height, width

"""Finds the video tokens of a ComfyUI attention call."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from residua.hosts import Grid, around

Ranges = tuple[tuple[int, int], ...]

# Class names of ComfyUI's diffusion models (a subclass counts as its parent). In the first kind every token
# of self-attention is video; in the second, text follows the video.
VIDEO_ONLY = ("WanModel", "MiniTrainDIT", "GeneralDIT", "LTXVModel", "LTXBaseModel")
VIDEO_FIRST = ("HunyuanVideo",)


@dataclass(frozen=True)
class Tokens:
    """Where the text of a call is, or why that is unknown."""

    grid: Grid | None
    text: Ranges = ()
    unknown: str = ""


def latent_grid(model: Any, latents: Any) -> Grid | None:
    """Frames, height and width in tokens of latents [B, C, frames, height, width]; None if unknown."""
    patch = _patch(model)
    if patch is None or getattr(latents, "ndim", 0) != 5:
        return None
    frames, height, width = (math.ceil(size / step) for size, step in zip(latents.shape[2:], patch, strict=True))
    return frames, height, width


def tokens_of(model: Any, grid: Grid | None, options: Mapping[str, Any], queries: int) -> Tokens | None:
    """Where the text of a self-attention call is; None if the call is too short to be that of the video.

    Args:
        model: The diffusion model.
        grid: Grid of the latents, from `latent_grid`.
        options: The call's transformer_options.
        queries: Number of query tokens.
    """
    told = options.get("grid_sizes")  # newer versions of Wan pass the grid
    if told is not None:
        frames, height, width = (int(size) for size in told)
        grid = (frames, height, width)
    names = {parent.__name__ for parent in type(model).__mro__}
    if grid is None:
        return Tokens(None, unknown=f"{type(model).__name__}: the number of video tokens is not known")
    video = math.prod(grid)
    if queries < video:
        return None
    span = options.get("img_slice")
    if span is not None:
        return Tokens(grid, around(int(span[0]), int(span[1]), queries))
    if queries == video or names & set(VIDEO_ONLY):
        return Tokens(grid)  # more tokens than the grid are reference frames, which are video too
    if names & set(VIDEO_FIRST):
        return Tokens(grid, around(0, video, queries))
    return Tokens(grid, unknown=f"{type(model).__name__}: {queries - video} of {queries} tokens are text somewhere")


def _patch(model: Any) -> tuple[int, int, int] | None:
    """The patch size of a diffusion model, under whichever name its authors used."""
    if hasattr(model, "patch_spatial"):
        return getattr(model, "patch_temporal", 1), model.patch_spatial, model.patch_spatial
    size = getattr(model, "patch_size", None)
    if size is None:
        size = getattr(getattr(model, "patchifier", None), "patch_size", None)
    if isinstance(size, int):
        return 1, size, size
    if isinstance(size, (tuple, list)) and len(size) == 3:
        frames, height, width = size
        return int(frames), int(height), int(width)
    return None

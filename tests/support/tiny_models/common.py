"""The grid of video tokens that every tiny model sees, and noise of its shape."""

from typing import Any

import torch

FRAMES, HEIGHT, WIDTH = 3, 8, 8
VIDEO = FRAMES * HEIGHT * WIDTH
Built = tuple[Any, dict[str, Any]]  # a model, and the inputs of one forward pass


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def latents(batch: int, channels: int, patch: int = 2, frames: int = FRAMES) -> torch.Tensor:
    return noise(batch, channels, frames, HEIGHT * patch, WIDTH * patch)

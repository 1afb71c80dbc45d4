"""Training batches: subsets of the tokens of random clips, rendered directly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from . import data
from .model import PATCH, coordinate_features, to_tokens

# Tokens closer than this to the object (in half-frames) are near; others are drawn at this relative rate.
_NEAR, _FAR_RATE = 0.2, 0.08


@dataclass(frozen=True)
class BatchShape:
    """What a training step looks at: so many clips, and of each as many tokens as `cut` says.

    "all": every token. "frames": the first frame and random others. "blocks": the first frame and random
    space-time blocks. "near": single tokens, half of them from the first frame, mostly where the object is;
    most of a frame is plain background, so this sees several times as many clips for the same cost.
    """

    clips: int
    cut: Literal["all", "frames", "blocks", "near"]
    tokens: int = 0
    num_frames: int = 32
    size: int = 64

    @property
    def frame_tokens(self) -> int:
        return (self.size // PATCH) ** 2


@dataclass(frozen=True)
class Batch:
    """Tokens carry 16 pixels per channel, channel-major."""

    clean: Tensor  # [B, N, 3 * 16]
    noise: Tensor  # [B, N, 3 * 16]
    level: Tensor  # [B], the noise level s
    given: Tensor  # [B, N], whether the token belongs to the first frame
    coordinates: Tensor  # [B, N, COORDINATE_CHANNELS * 16]
    rope: tuple[Tensor, Tensor]  # [B, N, 1, head_dim] each
    scenes: list[data.Scene | None]

    def inputs(self) -> Tensor:
        """The transformer's input tokens [B, N, IN_CHANNELS * 16]."""
        s = self.level.view(-1, 1, 1)
        noisy = (1 - s) * self.clean + s * self.noise
        mask = self.given.to(noisy)[..., None].expand(-1, -1, PATCH**2)
        first_frame = self.clean * self.given[..., None]
        return torch.cat([noisy, first_frame, mask, self.coordinates], dim=2)


def make_batch(
    transformer: WanTransformer3DModel,
    shape: BatchShape,
    generator: torch.Generator,
    *,
    shift: float,
    two_objects: float,
    drop_prompt: float,
    level: float | None = None,
) -> Batch:
    """A batch that depends on nothing but its arguments; `level` fixes the noise level for validation."""
    scenes = [data.random_scene(generator, two_objects) for _ in range(shape.clips)]
    layouts = [data.random_layout(scene, generator) for scene in scenes]
    index = torch.stack(
        [
            choose_tokens(shape, scene, layout, generator)
            for scene, layout in zip(scenes, layouts, strict=True)
        ]
    )  # [B, N]
    x, y, time = (values[index] for values in token_coordinates(shape.num_frames, shape.size))  # [B, N, 16]
    rows = zip(scenes, layouts, x, y, time, strict=True)
    clean = torch.stack([data.render(*row, pixel=2 / shape.size) for row in rows])  # [B, N, 16, 3]
    clean = clean.transpose(2, 3).flatten(2)
    cos, sin = transformer.rope(torch.empty(1, 1, shape.num_frames, shape.size, shape.size))
    levels = _noise_levels(shape.clips, shift, generator)
    if level is not None:
        levels = torch.full_like(levels, level)
    dropped = (torch.rand(shape.clips, generator=generator) < drop_prompt).tolist()
    return Batch(
        clean=clean,
        noise=torch.randn(clean.shape, generator=generator),
        level=levels,
        given=index < shape.frame_tokens,
        coordinates=coordinate_features(x, y, time).permute(1, 2, 0, 3).flatten(2),
        rope=(cos[0, index], sin[0, index]),
        scenes=[None if drop else scene for drop, scene in zip(dropped, scenes, strict=True)],
    )


def choose_tokens(
    shape: BatchShape, scene: data.Scene, layout: tuple[data.Placement, ...], generator: torch.Generator
) -> Tensor:
    """Sorted indices of the tokens that a step sees of a clip."""
    per_frame, side = shape.frame_tokens, shape.size // PATCH
    tokens = torch.arange(shape.num_frames * per_frame)
    if shape.cut == "all":
        return tokens
    if shape.cut == "near":
        x, y, time = (values.mean(1) for values in token_coordinates(shape.num_frames, shape.size))
        near = data.object_distance(scene, layout, x, y, time) < _NEAR
        rates = torch.where(near, 1.0, _FAR_RATE)
        half = shape.tokens // 2
        first = torch.multinomial(rates[:per_frame], half, generator=generator)
        rest = per_frame + torch.multinomial(rates[per_frame:], shape.tokens - half, generator=generator)
        return torch.cat([first, rest]).sort().values
    others = tokens[per_frame:]
    if shape.cut == "frames":
        groups = others.view(-1, per_frame)
    else:
        pairs = others[len(others) % (2 * per_frame) :]  # of frames
        groups = pairs.view(-1, 2, side // 4, 4, side // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, 32)
    count = (shape.tokens - per_frame) // groups.shape[1]
    order = torch.randperm(len(groups), generator=generator)
    if shape.cut == "frames" and torch.rand((), generator=generator) < 0.5:
        # Neighbouring frames, half of the time.
        order = torch.arange(count) + torch.randint(len(groups) - count + 1, (1,), generator=generator)
    return torch.cat([tokens[:per_frame], groups[order[:count]].flatten().sort().values])


@lru_cache(maxsize=8)
def token_coordinates(num_frames: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and time of every pixel of every token, [N, 16] each."""
    time, y, x = torch.meshgrid(*data.axes(num_frames, size, size), indexing="ij")
    x, y, time = (to_tokens(values[None, None])[0] for values in (x, y, time))
    return x, y, time


def _noise_levels(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Uniform levels pushed towards noise as the sampler's are: what moves where is decided there."""
    uniform = torch.rand(count, generator=generator)
    return shift * uniform / (1 + (shift - 1) * uniform)

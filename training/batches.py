"""Training batches: subsets of the tokens of random clips, rendered directly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from residua.world.model import PATCH, axes, coordinate_features, to_tokens
from residua.world.renderer import camera_rays, frame_times, look_of, project, shade, shadow_place
from residua.world.scenes import Scene

from .clips import Clips

# Tokens closer than this to a ball or a shadow (in half-pictures) are near; others are drawn at this rate.
_NEAR, _FAR_RATE = 0.16, 0.06


@dataclass(frozen=True)
class BatchShape:
    """What a training step looks at: so many clips, and of each as many tokens as `cut` says.

    "all": every token. "frames": the first frame and random others. "blocks": the first frame and random
    space-time blocks. "near": single tokens, `first` of them from the first frame, mostly where balls and
    shadows are; most of a frame is plain background, so this sees several times as many clips for its cost.
    """

    clips: int
    cut: Literal["all", "frames", "blocks", "near"]
    tokens: int = 0
    first: int = 0
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
    scenes: list[Scene | None]

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
    clips: Clips,
    generator: torch.Generator,
    *,
    shift: float,
    drop_prompt: float,
    level: float | None = None,
) -> Batch:
    """A batch that depends on nothing but its arguments.

    Args:
        transformer: For its rotary embedding.
        shape: What to take of the clips.
        clips: As many as the shape says.
        generator: Of tokens, noise and noise levels.
        shift: Of the noise levels, as the sampler's.
        drop_prompt: Share of clips that lose their prompt.
        level: One noise level for all, for validation.

    Returns:
        The batch.
    """
    count, per_frame = shape.clips, shape.frame_tokens
    index = choose_tokens(shape, clips, generator)  # [B, N]
    time = frame_times(shape.num_frames)[index // per_frame]  # [B, N]
    pixels = token_pixels(shape.size)[index % per_frame]  # [B, N, 16]
    rays = camera_rays(shape.size, shape.size)[pixels]
    image = shade(look_of(clips.scenes), rays, clips.paths.at(time), clips.paths.radius, 2 / shape.size)
    clean = image.transpose(2, 3).flatten(2)  # [B, N, 3 * 16]
    cos, sin = transformer.rope(torch.empty(1, 1, shape.num_frames, shape.size, shape.size))
    levels = _noise_levels(count, shift, generator)
    if level is not None:
        levels = torch.full_like(levels, level)
    dropped = (torch.rand(count, generator=generator) < drop_prompt).tolist()
    return Batch(
        clean=clean,
        noise=torch.randn(clean.shape, generator=generator),
        level=levels,
        given=index < per_frame,
        coordinates=token_features(shape.num_frames, shape.size)[index],
        rope=(cos[0, index], sin[0, index]),
        scenes=[None if drop else scene for drop, scene in zip(dropped, clips.scenes, strict=True)],
    )


def choose_tokens(shape: BatchShape, clips: Clips, generator: torch.Generator) -> Tensor:
    """Sorted indices of the tokens that a step sees of each clip, [B, N]."""
    tokens = torch.arange(shape.num_frames * shape.frame_tokens)
    if shape.cut == "all":
        return tokens.expand(shape.clips, -1)
    if shape.cut == "near":
        rates = torch.where(near_tokens(shape, clips), 1.0, _FAR_RATE)  # [B, T * frame_tokens]
        per_frame = shape.frame_tokens
        first = torch.multinomial(rates[:, :per_frame], shape.first, generator=generator)
        later = torch.multinomial(rates[:, per_frame:], shape.tokens - shape.first, generator=generator)
        return torch.cat([first, later + per_frame], dim=1).sort(dim=1).values
    return torch.stack([_choose_groups(shape, tokens, generator) for _ in range(shape.clips)])


def near_tokens(shape: BatchShape, clips: Clips) -> Tensor:
    """Which tokens are near a ball or its shadow, [B, T * frame_tokens]."""
    side = shape.size // PATCH
    centre = (torch.arange(side) + 0.5) / side * 2 - 1
    y, x = centre[:, None], centre[None]  # broadcast to [side, side]
    time = frame_times(shape.num_frames).expand(len(clips.scenes), -1)
    places = clips.paths.at(time)  # [B, K, T, 2]
    ball_x, ball_y, scale = project(places[..., 0], places[..., 1])
    floor_x, floor_z = shadow_place(look_of(clips.scenes), places)
    shadow_x, shadow_y, shadow_scale = project(floor_x, torch.zeros_like(floor_x), floor_z)
    radius = clips.paths.radius[..., None]
    hit = torch.zeros(len(clips.scenes), shape.num_frames, side, side, dtype=torch.bool)
    marks = ((ball_x, ball_y, radius * scale, 1.0), (shadow_x, shadow_y, radius * shadow_scale * 1.2, 2.2))
    for mark_x, mark_y, reach, squash in marks:
        for k in range(radius.shape[1]):
            away = torch.hypot(
                x - mark_x[:, k, :, None, None], squash * (y - mark_y[:, k, :, None, None])
            )  # [B, T, side, side]
            present = (radius[:, k] > 0)[..., None, None]
            hit |= (away < reach[:, k, :, None, None] + _NEAR) & present
    return hit.flatten(1)


def _choose_groups(shape: BatchShape, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """The first frame and random frames or space-time blocks."""
    per_frame, side = shape.frame_tokens, shape.size // PATCH
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
def token_pixels(size: int) -> Tensor:
    """Flat pixel indices of the tokens of a frame, [frame_tokens, 16]."""
    pixels = torch.arange(size * size, dtype=torch.float64).view(1, 1, 1, size, size)
    return to_tokens(pixels)[0].long()


@lru_cache(maxsize=8)
def token_features(num_frames: int, size: int) -> Tensor:
    """Coordinate channels of all tokens, [N, COORDINATE_CHANNELS * 16]."""
    time, y, x = torch.meshgrid(*axes(num_frames, size, size), indexing="ij")
    return to_tokens(coordinate_features(x, y, time)[None])[0]


def _noise_levels(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Uniform levels pushed towards noise as the sampler's are: what moves where is decided there."""
    uniform = torch.rand(count, generator=generator)
    return shift * uniform / (1 + (shift - 1) * uniform)

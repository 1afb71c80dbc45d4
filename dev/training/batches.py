"""Training batches: subsets of the tokens of random clips, rendered directly."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from residua.world.model import PATCH, axes, coordinate_features, to_tokens
from residua.world.renderer import camera_rays, frame_times, look_of, project, shade, shadow_place
from residua.world.scenes import Scene

from .clips import Clips, draw_clips

# Tokens closer than this (in half-pictures) to a ball or a shadow are near; others are drawn at this rate.
_NEAR, _FAR_RATE = 0.16, 0.06
_RATES_SEED = 2_000  # clips of this series decide which tokens "spread" draws more often


@dataclass(frozen=True)
class BatchShape:
    """What a training step sees: a number of clips, and the tokens of each that `cut` selects.

    "all": every token. "frames": the first frame and random others. "blocks": the first frame and random
    space-time blocks. "near": single tokens, `first` of them from the first frame, mostly near balls and
    shadows; most of a frame is plain background, so this covers several times as many clips at the same cost.
    "crops": the same, but the later ones are all tokens near balls and shadows of a few frames: what a clip
    looks like while it is sampled, where a token sees its neighbours and must agree with them. Both betray
    where the ball is: it is where the tokens are. "spread" does not: single tokens, drawn at the same rates
    whatever the clip shows. Nor do "frames" and "blocks"; with `first` they see as many tokens of the first
    frame, mostly near balls and shadows, instead of all.
    """

    clips: int
    cut: Literal["all", "frames", "blocks", "near", "crops", "spread"]
    tokens: int = 0
    first: int = 0
    num_frames: int = 32
    size: int = 64
    even: bool = False  # noise levels of a step are spread evenly over the clips instead of independently

    @property
    def frame_tokens(self) -> int:
        return (self.size // PATCH) ** 2


@dataclass(frozen=True)
class Batch:
    """The tensors of a training step. Tokens have 16 pixels per channel, channel-major."""

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
    """A batch that depends only on its arguments.

    Args:
        transformer: Supplies the rotary embedding.
        shape: Which tokens of the clips to take.
        clips: The clips, as many as the shape says.
        generator: Random numbers for tokens, noise and noise levels.
        shift: Shift of the noise levels, as in the sampler.
        drop_prompt: Share of clips whose prompt is dropped.
        level: One noise level for all clips, for validation."""
    count, per_frame = shape.clips, shape.frame_tokens
    index = choose_tokens(shape, clips, generator)  # [B, N]
    time = frame_times(shape.num_frames)[index // per_frame]  # [B, N]
    pixels = token_pixels(shape.size)[index % per_frame]  # [B, N, 16]
    rays = camera_rays(shape.size, shape.size)[pixels]
    image = shade(look_of(clips.scenes), rays, clips.paths.at(time), clips.paths.radius, 2 / shape.size)
    clean = image.transpose(2, 3).flatten(2)  # [B, N, 3 * 16]
    cos, sin = transformer.rope(torch.empty(1, 1, shape.num_frames, shape.size, shape.size))
    levels = _noise_levels(count, shift, generator, shape.even)
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
    per_frame, count = shape.frame_tokens, shape.tokens - shape.first
    if shape.cut == "spread":
        rates = usual_rates(shape.num_frames, shape.size).expand(shape.clips, -1)
        later = torch.multinomial(rates, count, generator=generator)
        first = _first_tokens(shape, near_tokens(shape, clips), generator)
        return torch.cat([first, later + per_frame], dim=1).sort(dim=1).values
    if shape.cut in ("near", "crops"):
        near = near_tokens(shape, clips)  # [B, T * frame_tokens]
        first = _first_tokens(shape, near, generator)
        if shape.cut == "near":
            rates = torch.where(near[:, per_frame:], 1.0, _FAR_RATE)
            later = torch.multinomial(rates, count, generator=generator)
        else:
            later = _crop_tokens(near[:, per_frame:].unflatten(1, (-1, per_frame)), count, generator)
        return torch.cat([first, later + per_frame], dim=1).sort(dim=1).values
    firsts = tokens[:per_frame].expand(shape.clips, -1)
    if shape.first:
        firsts = _first_tokens(shape, near_tokens(shape, clips), generator)
    return torch.stack([_choose_groups(shape, first, tokens, generator) for first in firsts])


def _first_tokens(shape: BatchShape, near: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens of the first frame, mostly near balls and shadows, which everyone may see there: [B, first]."""
    rates = torch.where(near[:, : shape.frame_tokens], 1.0, _FAR_RATE)
    return torch.multinomial(rates, shape.first, generator=generator).sort(dim=1).values


@lru_cache(maxsize=8)
def usual_rates(num_frames: int, size: int) -> Tensor:
    """How often a token of the later frames is near a ball or a shadow in any clip, [(T - 1) * frame_tokens];
    at least `_FAR_RATE`."""
    clips = draw_clips(_RATES_SEED, 0, 128, (0.5, 0.5, 0.0))
    shape = BatchShape(128, "near", num_frames=16, size=size)
    near = near_tokens(shape, clips).view(128 * 16, -1).float().mean(0)
    return near.clamp_min(_FAR_RATE).repeat(num_frames - 1)


def _crop_tokens(near: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices [B, count] of the near tokens (near: [B, T, frame_tokens]) of as many frames as it takes."""
    clips, frames, _ = near.shape
    order = torch.rand(clips, frames, generator=generator).argsort(dim=1)
    # In half of the clips the frames are neighbours.
    start = torch.randint(frames, (clips, 1), generator=generator)
    neighbours = torch.rand(clips, 1, generator=generator) < 0.5
    order = torch.where(neighbours, (torch.arange(frames) - start) % frames, order)  # [B, T]
    # Where the near tokens of all frames are too few, others follow.
    order = torch.where(near, order[..., None], order[..., None] + frames)
    return order.flatten(1).argsort(dim=1, stable=True)[:, :count]


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


def _choose_groups(shape: BatchShape, first: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """The first frame and random frames or space-time blocks."""
    per_frame, side = shape.frame_tokens, shape.size // PATCH
    others = tokens[per_frame:]
    if shape.cut == "frames":
        groups = others.view(-1, per_frame)
    else:
        pairs = others[len(others) % (2 * per_frame) :]  # pairs of frames
        groups = pairs.view(-1, 2, side // 4, 4, side // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, 32)
    count = (shape.tokens - len(first)) // groups.shape[1]
    if shape.cut == "blocks" and shape.first:
        rates = usual_rates(shape.num_frames, shape.size)[groups - per_frame].mean(dim=1)
        order = torch.multinomial(rates, count, generator=generator)
    else:
        order = torch.randperm(len(groups), generator=generator)
    if shape.cut == "frames" and torch.rand((), generator=generator) < 0.5:
        # Half of the time the frames are neighbours.
        order = torch.arange(count) + torch.randint(len(groups) - count + 1, (1,), generator=generator)
    return torch.cat([first, groups[order[:count]].flatten().sort().values])


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


def _noise_levels(count: int, shift: float, generator: torch.Generator, even: bool = False) -> Tensor:
    """Uniform levels shifted towards noise as in the sampler: the motion is decided at high noise."""
    uniform = torch.rand(count, generator=generator)
    if even:
        uniform = (torch.arange(count) + uniform) / count
    return shift * uniform / (1 + (shift - 1) * uniform)

"""Attention calls that look like those of a video model: 3-D rotary positions, moving objects, texture, and a
concentration that can be set from broad to very sparse. For demos, tests and benchmarks without weights."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# As concentrated as the heads at the 90th, 50th and 10th percentile of real video models: 95 % of the mass
# lies in about 0.7, 0.13 and 0.01 of the keys.
CONCENTRATIONS = {"broad": 9.0, "medium": 16.5, "sparse": 25.0}


@dataclass(frozen=True)
class VideoLike:
    """Recipe of a synthetic call over a (frames, height, width) grid of tokens."""

    grid: tuple[int, int, int] = (8, 16, 16)
    heads: int = 2
    head_dim: int = 64
    concentration: float = CONCENTRATIONS["medium"]  # logit of a row with itself
    locality: float = 0.5  # share of the logits that depends on the position alone
    objects: int = 6
    step: float = 0.0  # denoising time: calls with near values are alike, as in a real run
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the grid."""
        return math.prod(self.grid)


def video_like(recipe: VideoLike, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """A call with the structure of video.

    Args:
        recipe: What it is like; the same recipe always gives the same call.
        dtype: Of the tensors.

    Returns:
        q, k and v, [1, H, N, D] each.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    places = _places(recipe.grid)  # [N, 3]
    content = _content(recipe, places, generator)  # [N, E]
    width = content.shape[1]

    def weights() -> Tensor:
        return torch.randn(recipe.heads, width, recipe.head_dim, generator=generator) / math.sqrt(width)

    shared = weights()
    drift = math.cos(recipe.step), math.sin(recipe.step)
    q = content @ (drift[0] * (0.8 * shared + 0.6 * weights()) + drift[1] * weights())  # [H, N, D]
    k = content @ (drift[0] * (0.8 * shared + 0.6 * weights()) + drift[1] * weights())
    v = content @ weights() + 0.2 * torch.randn(recipe.heads, recipe.tokens, recipe.head_dim, generator=generator)
    q, k = _blend(q, recipe.locality), _blend(k, recipe.locality)
    gain = math.sqrt(recipe.concentration / math.sqrt(recipe.head_dim))
    rotation = _rotary(places, recipe.head_dim)
    q, k = (gain * _rotate(x, *rotation) for x in (q, k))
    return tuple(x[None].to(dtype).contiguous() for x in (q, k, v))  # type: ignore[return-value]


def grid_for(tokens: int) -> tuple[int, int, int]:
    """A (frames, height, width) grid of exactly that many tokens, as close as possible to a wide, short
    clip."""
    side = (2 * tokens) ** (1 / 3)

    def oddness(grid: tuple[int, int, int]) -> float:
        _, height, width = grid
        return abs(math.log(height / side)) + abs(math.log(width / (1.5 * height)))

    heights = [h for h in range(1, tokens + 1) if tokens % h == 0]
    widths = {h: [w for w in heights if (tokens // h) % w == 0] for h in heights}
    return min(((tokens // (h * w), h, w) for h in heights for w in widths[h]), key=oddness)


def key_fraction(q: Tensor, k: Tensor, mass: float = 0.95, rows: int = 64) -> Tensor:
    """Median share of the keys that hold `mass` of the attention, over evenly spaced rows.  # [B, H]"""
    index = torch.arange(min(rows, q.shape[2])) * q.shape[2] // min(rows, q.shape[2])
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    weights = (q[:, :, index].float() @ k.float().mT / math.sqrt(q.shape[-1])).softmax(-1)
    held = weights.sort(-1, descending=True).values.cumsum(-1)
    return ((held < mass).sum(-1) + 1).float().median(-1).values / k.shape[2]


def _places(grid: tuple[int, int, int]) -> Tensor:
    axes = torch.meshgrid(*(torch.arange(size, dtype=torch.float32) for size in grid), indexing="ij")
    return torch.stack(axes, -1).view(-1, 3)


def _content(recipe: VideoLike, places: Tensor, generator: torch.Generator) -> Tensor:
    """What is seen at each token: objects that move over the frames, a smooth scene, fine texture."""
    width = 64
    size = torch.tensor(recipe.grid, dtype=torch.float32)
    unit = places / size.clamp(min=1)  # [N, 3] in [0, 1)
    begin = torch.rand(recipe.objects, 2, generator=generator)
    motion = 0.6 * (torch.rand(recipe.objects, 2, generator=generator) - 0.5)
    radius = 0.08 + 0.15 * torch.rand(recipe.objects, 1, generator=generator)
    look = torch.randn(recipe.objects, width, generator=generator)
    centre = begin[:, None] + motion[:, None] * unit[:, :1]  # [objects, N, 2]
    distance = (unit[:, 1:] - centre).norm(dim=-1) / radius  # [objects, N]
    content = torch.sigmoid(8 * (1 - distance)).mT @ look
    waves = torch.randn(3, 32, generator=generator) * torch.tensor([[1.0], [3.0], [3.0]]) * math.pi
    scene = torch.cat([(unit @ waves).sin(), (unit @ waves).cos()], -1)
    texture = 0.3 * torch.randn(len(places), width, generator=generator)
    return content + 0.7 * scene + texture


def _blend(x: Tensor, locality: float) -> Tensor:
    """Rows of length sqrt(D): part content, part a constant that the rotary embedding turns into a
    position."""
    constant = torch.ones_like(x)
    content = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) * math.sqrt(x.shape[-1])
    return math.sqrt(1 - locality) * content + math.sqrt(locality) * constant


def _rotary(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a 3-D rotary embedding; each axis turns its own third of the channel pairs."""
    pairs = head_dim // 2
    axis = torch.arange(pairs) * 3 // max(1, pairs)
    within = torch.arange(pairs) - torch.searchsorted(axis, axis)
    frequency = 100.0 ** (-within / max(1, pairs / 3))
    angle = places[:, axis] * frequency  # [N, pairs]
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

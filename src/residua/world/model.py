"""The world model: a small WanTransformer3DModel in pixel space and a learned prompt table.

The transformer gets the noisy clip, the first frame with a mask that says where it is valid (as in
Wan2.2-I2V), and coordinate channels: RoPE only encodes offsets, and so small a model needs absolute
positions. It predicts the clean clip x0; with x_s = (1 - s) x0 + s noise, the flow-matching velocity is (x_s
- x0) / s.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from .renderer import frame_times
from .scenes import COLOURS, FLOORS, MATERIALS, MAX_BALLS, MOTIONS, TIMES, Scene

PATCH = 4
TEXT_DIM = 128
NULL_WORD, NO_BALL = "<null>", "<none>"
WORDS = (NULL_WORD, NO_BALL, *FLOORS, *TIMES, *COLOURS, *MATERIALS, *MOTIONS)
CONTEXT_TOKENS = 1 + MAX_BALLS  # one for floor and time of day, and one for each ball
# coordinates enter as they are, and as sines and cosines of these multiples of pi
_SPACE_FREQUENCIES, _TIME_FREQUENCIES = (1.0, 2.0, 4.0), (0.5, 1.0, 2.0, 4.0)
COORDINATE_CHANNELS = 2 * (1 + 2 * len(_SPACE_FREQUENCIES)) + 1 + 2 * len(_TIME_FREQUENCIES)
IN_CHANNELS = 3 + 3 + 1 + COORDINATE_CHANNELS  # noisy clip, first frame, mask, coordinates

TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": (1, PATCH, PATCH),
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "in_channels": IN_CHANNELS,
    "out_channels": 3,
    "text_dim": TEXT_DIM,
    "freq_dim": 256,
    "ffn_dim": 768,
    "num_layers": 6,
    "cross_attn_norm": True,
    "rope_max_seq_len": 256,
}


class PromptTable(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """The text encoder: one learned vector per word. There is one context token for floor and time of day and
    one for each ball, each the sum of its words, so that colour, material and motion of a ball stay together.
    `max_balls` records how many balls the training clips had at most."""

    @register_to_config
    def __init__(self, words: tuple[str, ...] = WORDS, dim: int = TEXT_DIM, max_balls: int = MAX_BALLS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(words), dim))

    def forward(self, counts: Tensor) -> Tensor:
        """How often each word is in each token, [B, CONTEXT_TOKENS, len(words)] -> the context, [B, CONTEXT_TOKENS,
        dim]."""
        return counts.to(self.weight.dtype) @ self.weight

    def encode(self, scenes: list[Scene | None]) -> Tensor:
        """The context of B parsed prompts, [B, CONTEXT_TOKENS, dim]; None stands for the empty prompt of
        classifier-free guidance."""
        index = {word: i for i, word in enumerate(self.config["words"])}
        counts = torch.zeros(len(scenes), CONTEXT_TOKENS, len(index))
        for row, scene in enumerate(scenes):
            for token, words in enumerate(_context_words(scene)):
                for word in words:
                    counts[row, token, index[word]] = 1
        return self(counts.to(self.weight.device))


class WorldModel(nn.Module):
    """Transformer and prompt table, trained together."""

    def __init__(self, transformer: WanTransformer3DModel, prompt_table: PromptTable) -> None:
        super().__init__()
        self.transformer = transformer
        self.prompt_table = prompt_table


def _context_words(scene: Scene | None) -> list[tuple[str, ...]]:
    if scene is None:
        return [(NULL_WORD,)] * CONTEXT_TOKENS
    words: list[tuple[str, ...]] = [(scene.floor, scene.time)]
    words += [(ball.colour, ball.material, ball.motion) for ball in scene.balls]
    return words + [(NO_BALL,)] * (CONTEXT_TOKENS - len(words))


def build_model(
    generator: torch.Generator, num_layers: int = TRANSFORMER_CONFIG["num_layers"], max_balls: int = MAX_BALLS
) -> WorldModel:
    """A freshly initialised model; `max_balls` is recorded in the prompt table. Residual branches start at zero and
    nothing favours neighbours: any sparsity that the attention shows later was learned."""
    # The constructor initialises from the global generator; these weights are replaced below.
    with torch.random.fork_rng(devices=[]):
        transformer = WanTransformer3DModel(**(TRANSFORMER_CONFIG | {"num_layers": num_layers}))
    table = PromptTable(max_balls=max_balls)
    with torch.no_grad():
        for module in transformer.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5, generator=generator)
                module.bias.zero_()
        embedding = transformer.patch_embedding
        embedding.weight.normal_(std=(IN_CHANNELS * 8) ** -0.5, generator=generator)
        embedding.bias.zero_()
        transformer.condition_embedder.time_proj.weight.normal_(std=0.02, generator=generator)
        for block in transformer.blocks:
            for branch in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]):
                branch.weight.zero_()
            block.scale_shift_table.zero_()
            block.scale_shift_table[:, [2, 5]] = 1  # the gates of attention and feed-forward
        transformer.scale_shift_table.zero_()
        transformer.proj_out.weight.zero_()
        table.weight.normal_(std=0.5, generator=generator)
    return WorldModel(transformer, table)


def axes(num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Time of the frames in [0, 1], and the pixel centres of y (downwards) and x in (-1, 1)."""
    y = (torch.arange(height) + 0.5) / height * 2 - 1
    x = (torch.arange(width) + 0.5) / width * 2 - 1
    return frame_times(num_frames), y, x


def coordinate_features(x: Tensor, y: Tensor, time: Tensor) -> Tensor:
    """What the transformer is told about positions: values, sines and cosines. x and y in [-1, 1] and time in [0,
    1], all of one shape S -> [COORDINATE_CHANNELS, *S]."""
    channels = []
    axes = ((x, _SPACE_FREQUENCIES), (y, _SPACE_FREQUENCIES), (time * 2 - 1, _TIME_FREQUENCIES))
    for values, frequencies in axes:
        channels.append(values)
        for frequency in frequencies:
            angle = math.pi * frequency * values
            channels += [angle.sin(), angle.cos()]
    return torch.stack(channels)


def condition_channels(first_frame: Tensor, num_frames: int) -> Tensor:
    """The input channels other than the noisy clip: first frame, its mask and coordinates. [B, 3, H, W] in [-1, 1]
    -> [B, IN_CHANNELS - 3, T, H, W]."""
    batch, _, height, width = first_frame.shape
    condition = first_frame.new_zeros(batch, 4, num_frames, height, width)
    condition[:, :3, 0] = first_frame
    condition[:, 3, 0] = 1
    time, y, x = torch.meshgrid(*axes(num_frames, height, width), indexing="ij")
    coordinates = coordinate_features(x, y, time).to(first_frame)
    return torch.cat([condition, coordinates.expand(batch, -1, -1, -1, -1)], dim=1)


def to_tokens(video: Tensor) -> Tensor:
    """A video as tokens in the order of Wan's patch embedding: [B, C, T, H, W] -> [B, T * H/4 * W/4, C * 16]."""
    batch, channels, frames, height, width = video.shape
    grid = video.view(batch, channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return grid.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, -1, channels * PATCH**2)


def forward_tokens(
    transformer: WanTransformer3DModel,
    tokens: Tensor,
    rope: tuple[Tensor, Tensor],
    timestep: Tensor,
    context: Tensor,
    blocks: Sequence[Callable[..., Tensor]] | None = None,
) -> Tensor:
    """The transformer on any subset of a clip's tokens at their true positions; on all tokens it equals the model's own
    forward. The cost of a clip is quadratic in its length, so subsets make training on long clips affordable.

    Args:
        transformer: The model.
        tokens: [B, N, IN_CHANNELS * 16].
        rope: Rotary embedding of these tokens, [B, N, 1, head_dim] each.
        timestep: [B], noise level times 1000.
        context: Context of the prompts, [B, CONTEXT_TOKENS, TEXT_DIM].
        blocks: Used instead of the transformer's own (compiled ones).

    Returns:
        Predicted clean tokens [B, N, 3 * 16].
    """
    embedding = transformer.patch_embedding
    hidden = F.linear(tokens, embedding.weight.flatten(1), embedding.bias)  # [B, N, D]
    time, projection, context, _ = transformer.condition_embedder(timestep, context, None)
    projection = projection.unflatten(1, (6, -1))
    for block in blocks or transformer.blocks:
        hidden = block(hidden, context, projection, rope)
    shift, scale = (transformer.scale_shift_table + time[:, None]).chunk(2, dim=1)
    output = transformer.proj_out(transformer.norm_out(hidden.float()) * (1 + scale) + shift)
    # Wan's output is pixel-major, its input channel-major; return the input's order.
    return output.unflatten(2, (PATCH**2, 3)).transpose(2, 3).flatten(2)

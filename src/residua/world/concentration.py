"""How concentrated the trained attention is: `python -m residua.world.concentration`.

Prints, per layer and head, the share of keys that a query needs for 95 % of its attention, averaged over
random queries of clips noised to several levels.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import WEIGHTS, load_pipeline
from .model import condition_channels
from .pipeline import WorldPipeline
from .renderer import render_video
from .scenes import default_layout, parse_prompt

PROMPTS = (
    "a red rubber ball thrown right on a sand floor at noon",
    "a blue clay ball lobbed left on a slate floor in the evening",
)
LEVELS = (0.95, 0.8, 0.5)


class _Recorder(TorchFunctionMode):
    """Records every attention call while active, whichever processor makes it."""

    def __init__(self, queries: int, mass: float, generator: torch.Generator) -> None:
        super().__init__()
        self.queries, self.mass, self.generator = queries, mass, generator
        self.shares: list[Tensor] = []  # one [H] per self-attention call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key = _first_two(*args, **kwargs)  # [B, H, N, D] each
            if query.shape == key.shape:
                self.shares.append(self._share(query, key))
        return func(*args, **kwargs)

    def _share(self, query: Tensor, key: Tensor) -> Tensor:
        rows = torch.randperm(query.shape[2], generator=self.generator)[: self.queries]
        scores = query[:, :, rows] @ key.mT / query.shape[-1] ** 0.5  # [B, H, rows, N]
        sorted_mass = scores.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
        needed = (sorted_mass < self.mass).sum(-1) + 1
        return needed.double().mean(dim=(0, 2)) / key.shape[2]


def _first_two(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query, key


@torch.no_grad()
def attention_concentration(
    pipeline: WorldPipeline,
    *,
    num_frames: int = 32,
    size: int = 64,
    queries: int = 256,
    mass: float = 0.95,
    prompts: tuple[str, ...] = PROMPTS,
    levels: tuple[float, ...] = LEVELS,
    seed: int = 0,
) -> Tensor:
    """Share of the keys that hold `mass` of the attention of random rows (`queries` of each call), [levels, layers,
    heads]: mean over prompts whose clips are noised to each level."""
    generator = torch.Generator().manual_seed(seed)
    shares = []
    for level in levels:
        per_prompt = []
        for prompt in prompts:
            scene = parse_prompt(prompt)
            truth = render_video(scene, default_layout(scene), num_frames, size, size)[None]
            noisy = torch.lerp(truth, torch.randn(truth.shape, generator=generator), level)
            inputs = torch.cat([noisy, condition_channels(truth[:, :, 0], num_frames)], dim=1)
            context = pipeline.prompt_table.encode([scene])
            with _Recorder(queries, mass, generator) as recorder:
                pipeline.transformer(inputs, torch.tensor([level * 1000]), context, return_dict=False)
            per_prompt.append(torch.stack(recorder.shares))  # [layers, heads]
        shares.append(torch.stack(per_prompt).mean(0))
    return torch.stack(shares)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m residua.world.concentration", description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--num-frames", type=int, default=32)
    parser.add_argument("--size", type=int, default=64)
    args = parser.parse_args()
    shares = attention_concentration(load_pipeline(args.weights), num_frames=args.num_frames, size=args.size)
    tokens = args.num_frames * (args.size // 4) ** 2
    print(f"share of {tokens} keys that hold 95 % of the attention, per head, at noise levels {LEVELS}")
    for layer in range(shares.shape[1]):
        rows = ("  ".join(f"{value:6.1%}" for value in head.tolist()) for head in shares[:, layer].T)
        print(f"layer {layer}: " + "   |  ".join(rows))
    print(f"mean: {shares.mean():.1%}")


if __name__ == "__main__":
    main()

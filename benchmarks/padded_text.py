"""Padded text is neither computed nor counted: one block of HunyuanVideo-1.5 at its real width with random
weights, 8,320 video tokens and 1,985 rows of text, of which 136 are valid.

    python benchmarks/padded_text.py

Prints the relative error of the transformer's output at density 0.22, and the same with every row of text
taken as valid, which uses up the budget of the video. Needs some gigabytes and a minute or two.
"""

from __future__ import annotations

import diffusers
import torch

import residua
from residua.integration import padding

MLLM, GLYPH, IMAGE = 1000, 256, 729  # rows of the two text encoders and of the image encoder
VALID = (100, 36)


def build() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = diffusers.HunyuanVideo15Transformer3DModel(num_layers=1, num_refiner_layers=1).eval()
    masks = [
        (torch.arange(rows) < valid).long()[None] for rows, valid in zip((MLLM, GLYPH), VALID, strict=True)
    ]
    config = model.config

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    return model, {
        "hidden_states": noise(1, config.in_channels, 13, 20, 32), "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": noise(1, MLLM, config.text_embed_dim), "encoder_attention_mask": masks[0],
        "encoder_hidden_states_2": noise(1, GLYPH, config.text_embed_2_dim),
        "encoder_attention_mask_2": masks[1],
        "image_embeds": torch.zeros(1, IMAGE, config.image_embed_dim),
    }  # fmt: skip


def sparse_error(model: torch.nn.Module, inputs: dict[str, torch.Tensor], dense: torch.Tensor) -> str:
    with residua.accelerate(model, density=0.22, steps=1) as handle:
        out = model(**inputs)[0]
        total = handle.report().total
    error = float((out - dense).norm() / dense.norm())
    return f"error of the output {error:.4f}, estimated error of attention {total.error:.4f}"


@torch.inference_mode()
def main() -> None:
    model, inputs = build()
    dense = model(**inputs)[0]
    print("padding left out:", sparse_error(model, inputs, dense))
    padding.PaddingReader.compact = lambda *_: None
    print("padding computed:", sparse_error(model, inputs, dense))


if __name__ == "__main__":
    main()

"""A call on the native backend, for the Python of an environment that has residua installed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import residua

TOKENS, DIM = 4096, 64


def smooth(seed: int) -> torch.Tensor:  # [1, 2, TOKENS, DIM]
    """Tokens that resemble their neighbours, as those of a video do."""
    waves = torch.linspace(0, 6, TOKENS)[:, None] * torch.linspace(0.5, 4, DIM) + seed
    noise = torch.randn(1, 2, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))
    return waves.sin() + 0.1 * noise


def main() -> None:
    source = Path(__file__).parents[2] / "src"
    if source in Path(residua.__file__).parents:
        sys.exit(f"residua comes from {residua.__file__}, not from an installation")
    q, k, v = smooth(1), smooth(2), smooth(3)
    out = residua.attention(q, k, v, residua.Config(density=0.22, backend="native"))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean().item()
    if not error < 0.05:
        sys.exit(f"native backend: mean row error {error:.3f}, wanted below 0.05")
    print(
        f"residua {residua.__version__} from {residua.__file__}: native backend, mean row error {error:.4f}"
    )


if __name__ == "__main__":
    main()

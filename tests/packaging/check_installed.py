"""A call on the native backend, for the Python of an environment that has residua installed."""

import sys
from pathlib import Path

import torch

import residua
from residua.tools.synthetic import VideoLike, video_like

CONFIG = residua.Config(density=0.22, backend="native")


def main() -> None:
    source = Path(__file__).parents[2] / "src"
    if source in Path(residua.__file__).parents:
        sys.exit(f"residua comes from {residua.__file__}, not from an installation")
    q, k, v = video_like(VideoLike(grid=(4, 32, 32), heads=2, head_dim=64))
    out, receipt = residua.attention(q, k, v, CONFIG, return_receipt=True)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean().item()
    if receipt.backend != "native" or receipt.cost > 0.25:
        sys.exit(f"wanted a call of the native backend at a cost of 22 %: {receipt}")
    if not 0.0 < error < 0.1:
        sys.exit(f"native backend: mean row error {error:.3f}, wanted an approximation below 0.1")
    print(f"residua {residua.__version__} from {residua.__file__}: {receipt}; true error {error:.4f}")


if __name__ == "__main__":
    main()

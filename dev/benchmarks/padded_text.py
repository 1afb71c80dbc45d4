"""Padded text is neither computed nor counted: the error of the video's rows with and without that rule.

    python -m dev.benchmarks.padded_text

One self-attention call with 8,320 video tokens at density 0.22, through the same object that `accelerate`
uses. Queries, keys and values of the video are structured as in a video model (`residua.tools.synthetic`: three
concentrations, head dim 128; noise through random weights has no structure that could be reconstructed),
those of the text are random. The text follows the video, its valid rows first, as in HunyuanVideo-1.5 (1,985
rows, 136 valid), HunyuanVideo and Mochi (256 rows, 40 valid). Prints mean and p99 of the relative row error
of the video against dense attention. "counted": every row of text is computed exactly and kept by every
query, as if it were valid, out of the budget of the video. Takes a minute or two and 2 GB.
"""

import logging
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from residua import Config
from residua.hosts import HostAttention, Pass, Preset, Settings, Site, around, make_report
from residua.hosts.padding import PaddingReader
from residua.tools.metrics.row_error import row_errors
from residua.tools.synthetic import CONCENTRATIONS, VideoLike, video_like

GRID, HEADS, HEAD_DIM = (13, 20, 32), 4, 128
TEXTS = {"HunyuanVideo-1.5": (1985, 136), "HunyuanVideo, Mochi": (256, 40)}  # rows, of which valid
METHODS = {"anchored": Config(), "paper": Config.paper()}
PRESET = Preset(0.22, 0, 0, "none")


def joint_call(recipe: VideoLike, text: int) -> tuple[Tensor, ...]:
    """q, k, v [1, H, video + text, D]: random text after structured video, of the same mean norm."""
    draw = torch.Generator().manual_seed(1)

    def with_text(x: Tensor) -> Tensor:
        rows = torch.randn(1, recipe.heads, text, recipe.head_dim, generator=draw)
        rows *= x.norm(dim=-1).mean() / rows.norm(dim=-1, keepdim=True)
        return torch.cat([x, rows], dim=2)

    return tuple(map(with_text, video_like(recipe)))


def padded_call(text: int, valid: int, concentration: float) -> tuple[Tensor, ...]:
    """q, k, v, and the key mask [1, 1, 1, video + text]."""
    recipe = VideoLike(GRID, HEADS, HEAD_DIM, concentration)
    mask = torch.arange(recipe.tokens + text) < recipe.tokens + valid
    return *joint_call(recipe, text), mask[None, None, None]


def sparse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, config: Config) -> tuple[Tensor, float]:
    """The output of a call at 22 %, and what it cost."""
    host = HostAttention(Settings(config, density=0.22, min_tokens=0).resolve(PRESET))
    video = GRID[0] * GRID[1] * GRID[2]
    text = around(0, video, q.shape[2])
    site = Site(0, Pass(steps=1, grid=GRID), text_queries=text, text_keys=text)
    out = host.call(q, k, v, site, lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask), mask=mask)
    return out, make_report([host]).total.cost


@torch.inference_mode()
def main() -> None:
    logging.getLogger("residua").setLevel(logging.ERROR)  # warnings of large errors: the table shows them
    print("| text of | head | dtype | method | left out | counted |\n|---|---|---|---|---:|---:|")
    for model, (text, valid) in TEXTS.items():
        for head, concentration in CONCENTRATIONS.items():
            call = padded_call(text, valid, concentration)
            dense = scaled_dot_product_attention(*call[:3], attn_mask=call[3])
            for dtype in (torch.float32, torch.bfloat16):
                q, k, v = (x.to(dtype) for x in call[:3])
                for method, config in METHODS.items():
                    left_out, cost = sparse(q, k, v, call[3], config)
                    with mock.patch.object(PaddingReader, "compact", lambda *_: None):
                        counted, _ = sparse(q, k, v, call[3], config)
                    assert cost < 0.225, cost
                    print(
                        f"| {model} | {head} | {str(dtype).removeprefix('torch.')} | {method} "
                        f"| {_shown(left_out, dense)} | {_shown(counted, dense)} |",
                        flush=True,
                    )


def _shown(out: Tensor, dense: Tensor) -> str:
    """Mean and p99 over the rows of the video."""
    video = GRID[0] * GRID[1] * GRID[2]
    mean, p99 = row_errors(out[:, :, :video].float(), dense[:, :, :video])
    return f"{mean:.4f} / {p99:.3f}"


if __name__ == "__main__":
    main()

"""How much of a fixed density text may take: error of the video's rows and cost of the call, by what text
must leave of the density for the pairs that may be skipped.

    python -m dev.benchmarks.text_budget

One cold call per row of the table, structured as in a video model (`padded_text.py`), text after the video:
as many valid rows as in HunyuanVideo-1.5 (136, and 865 with a picture) and HunyuanVideo (256) beside 8,320
video tokens, and as in Flux.1 (512) beside the 4,096 of a picture of 1024 x 1024. "all": text comes on top of
the density. "0": it is paid from it, to the last pair. Takes some minutes and 1 GB.
"""

from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from residua import Config, attention
from residua.tools.metrics.row_error import row_errors
from residua.tools.synthetic import CONCENTRATIONS, VideoLike

from .padded_text import joint_call

HEADS, HEAD_DIM = 2, 128
VIDEO, PICTURE = (13, 20, 32), (1, 64, 64)
CALLS = [(VIDEO, 865, 0.22), (PICTURE, 512, 0.22), (VIDEO, 256, 0.08), (VIDEO, 136, 0.08), (VIDEO, 136, 0.22)]
LEFT = {"0": 1e-3, "1/4": 1 / 4, "1/2": 1 / 2, "all": 1.0}


def row(grid: tuple[int, int, int], text: int, density: float, head: str) -> str:
    q, k, v = joint_call(VideoLike(grid, HEADS, HEAD_DIM, CONCENTRATIONS[head]), text)
    dense = scaled_dot_product_attention(q, k, v)
    video = q.shape[2] - text
    spans = (video, video + text)
    shown = []
    for left in LEFT.values():
        with mock.patch("residua.method.sizes.LEFT_BY_TEXT", left):
            out, receipt = attention(
                q, k, v, Config(density=density), pinned_keys=spans, exact_queries=spans, return_receipt=True
            )
        mean, p99 = row_errors(out[:, :, :video], dense[:, :, :video])
        shown.append(f"{mean:.3f} / {p99:.2f}, {receipt.cost:.1%}")
    return f"| {video:,} + {text} | {density:g} | {head} | {' | '.join(shown)} |"


@torch.inference_mode()
def main() -> None:
    print(f"| tokens | density | head | {' | '.join(LEFT)} |\n|---|---|---|{'---|' * len(LEFT)}")
    for grid, text, density in CALLS:
        for head in CONCENTRATIONS:
            print(row(grid, text, density, head), flush=True)


if __name__ == "__main__":
    main()

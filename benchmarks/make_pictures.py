"""Makes the pictures of the README and of the model's card: `python benchmarks/make_pictures.py`.

Report scenes of the model in the box, dense above sparse, as an animation (docs/images/demo.webp) and as a
sheet of frames with the simulator's clip above both (docs/images/world-strip.png). Prints the physics.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from residua import accelerate
from residua.generation.loading import WORLD, Placement, load
from residua.generation.physics import run_physics
from residua.generation.run import Request, generate
from residua.generation.videos import (
    contact_sheet,
    encode_png,
    encode_webp,
    enlarged,
    side_by_side,
    to_pixels,
)
from residua.lab.video_quality import psnr
from residua.world.held_out import DEMO_PROMPT, REPORT_PROMPTS
from residua.world.renderer import render_video
from residua.world.scenes import default_layout, parse_prompt

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SECONDS = 2  # of a clip
PROMPTS = (DEMO_PROMPT, REPORT_PROMPTS[4], REPORT_PROMPTS[3])


def true_clip(prompt: str, frames: int) -> np.ndarray:
    scene = parse_prompt(prompt)
    video = (render_video(scene, default_layout(scene), frames, 64, 64) + 1) / 2  # [3, T, H, W]
    return video.permute(1, 2, 3, 0).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quality", default="balanced")
    given = parser.parse_args()
    pipe = load(WORLD, Placement(device="cpu"))
    columns, rows = [], {}
    for prompt in PROMPTS:
        request = Request(prompt, steps=given.steps, frames=given.frames)
        dense = generate(pipe, request).frames
        with accelerate(pipe, quality=given.quality, min_tokens=0) as handle:
            sparse = generate(pipe, request).frames
            cost = handle.report().total.cost
        found = run_physics(pipe, request, sparse, dense)
        assert found is not None and cost is not None
        print(f"{prompt}: {psnr(sparse, dense):.1f} dB; sparse from dense: {found.from_dense}")
        print(
            f"  sparse from the simulator: {found.from_truth}\n  dense: {found.dense_from_truth}", flush=True
        )
        stacked = [
            side_by_side({caption: enlarged(to_pixels(clip), 192)})
            for caption, clip in (("dense", dense), (f"sparse, {cost:.0%} of the work", sparse))
        ]
        columns.append(np.concatenate(stacked, axis=1))
        true = true_clip(prompt, given.frames)
        for name, clip in (("simulator", true), ("dense", dense), ("sparse", sparse)):
            rows[f"{name}: {prompt}"] = to_pixels(clip)
    IMAGES.joinpath("demo.webp").write_bytes(
        encode_webp(np.concatenate(columns, axis=2), max(1, given.frames // SECONDS))
    )
    IMAGES.joinpath("world-strip.png").write_bytes(encode_png(contact_sheet(rows)))


if __name__ == "__main__":
    with torch.no_grad():
        main()

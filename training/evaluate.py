"""Evaluates weights: `python -m training.evaluate DIR/weights --out DIR/look`.

Generates held-out clips, measures their physics against the simulator, and writes a strip per number of
balls: the true clip above the generated one. Both decide whether a stage of the training is finished.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from residua.world import load_pipeline
from residua.world.physics import physics_of
from residua.world.pipeline import WorldPipeline
from residua.world.renderer import render_video

from .clips import draw_clips
from .strips import HELD_OUT_SEED, contact_strip


def evaluate(
    pipeline: WorldPipeline,
    out: Path,
    *,
    balls: int,
    clips: int = 8,
    num_frames: int = 32,
    steps: int = 10,
    size: int = 64,
) -> list[dict[str, Any]]:
    """Generates held-out clips with that many balls, writes their strip, and measures them.

    Args:
        pipeline: The pipeline to evaluate.
        out: Folder of the strip.
        balls: Balls in each clip.
        clips: Number of clips.
        num_frames: Frames of a clip.
        steps: Steps of the sampler.
        size: Width and height of a frame in pixels.

    Returns:
        For each clip its prompt, its PSNR against the true clip, and its physics against the simulator's.
    """
    shares = (float(balls == 1), float(balls == 2), float(balls == 3))
    held_out = draw_clips(HELD_OUT_SEED, 0, clips, shares)
    rows, records = [], []
    for i, (scene, layout) in enumerate(zip(held_out.scenes, held_out.layouts, strict=True)):
        paths = held_out.paths[[i]]
        truth = (render_video(scene, layout, num_frames, size, size, paths) + 1) / 2  # [3, T, H, W]
        clip = pipeline(
            str(scene),
            image=truth[None, :, 0],
            height=size,
            width=size,
            num_frames=num_frames,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(i),
        ).frames[0]  # type: ignore[union-attr]
        real = truth.permute(1, 2, 3, 0).numpy()
        physics = physics_of(clip, scene, paths)
        psnr = float(-10 * np.log10(np.square(clip - real).mean()))
        records.append({"prompt": str(scene), "psnr": psnr, "kept": physics.kept, **asdict(physics)})
        rows += [real, clip]
        contact_strip(rows, out / f"balls-{balls}.png")
        print(f"{psnr:.1f} dB; {physics}: {scene}", flush=True)
    return records


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("weights", type=Path, help="a folder as written by python -m training.train")
    parser.add_argument("--out", type=Path, required=True, help="folder for strips and evaluation.json")
    parser.add_argument("--balls", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--clips", type=int, default=8, help="per number of balls")
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    pipeline = load_pipeline(args.weights)
    pipeline.set_progress_bar_config(disable=True)
    records = {}
    for balls in args.balls:
        found = evaluate(
            pipeline, args.out, balls=balls, clips=args.clips, num_frames=args.frames, steps=args.steps
        )
        records[str(balls)] = found
        kept = sum(record["kept"] for record in found)
        print(f"{balls} balls: kept in {kept} of {len(found)} clips", flush=True)
        (args.out / "evaluation.json").write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()

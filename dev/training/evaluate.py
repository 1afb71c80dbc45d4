"""Evaluates weights: `python -m dev.training.evaluate DIR/weights --out DIR/look`.

Generates held-out clips, measures their physics against the simulator, and writes a strip per number of
balls: the true clip above the generated one. Both decide whether a stage of the training is finished.
`--scenes report` takes the scenes of `residua.world.held_out` instead of random ones.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from residua.world import load_pipeline
from residua.world.held_out import SEEDS, SETS
from residua.world.physics import physics_of
from residua.world.pipeline import WorldPipeline
from residua.world.scenes import default_layout, parse_prompt
from residua.world.simulator import simulate

from .clips import Clips, draw_clips
from .strips import HELD_OUT_SEED, contact_strip, true_and_generated


def evaluate(
    pipeline: WorldPipeline,
    strip: Path,
    held_out: Clips,
    *,
    seeds: list[int],
    num_frames: int = 32,
    steps: int = 10,
    size: int = 64,
) -> list[dict[str, Any]]:
    """Generates held-out clips of these noise seeds, writes their strip, and measures them: for each its prompt, its
    PSNR against the true clip, and its physics against the simulator's."""
    rows, records = [], []
    for i, scene in enumerate(held_out.scenes):
        generator = torch.Generator().manual_seed(seeds[i])
        real, clip = true_and_generated(pipeline, held_out, i, generator, num_frames, steps, size)
        physics = physics_of(clip, scene, held_out.paths[[i]])
        psnr = float(-10 * np.log10(np.square(clip - real).mean()))
        records.append({"prompt": str(scene), "psnr": psnr, "kept": physics.kept, **asdict(physics)})
        rows += [real, clip]
        contact_strip(rows, strip)
        print(f"{psnr:.1f} dB; {physics}: {scene}", flush=True)
    kept = sum(record["kept"] for record in records)
    error, psnr = (float(np.mean([r[key] for r in records])) for key in ("position_error", "psnr"))
    print(f"kept in {kept} of {len(records)} clips, {error:.3f} radii off, {psnr:.1f} dB", flush=True)
    return records


def random_clips(balls: int, count: int) -> Clips:
    """Random clips with that many balls, never trained on."""
    return draw_clips(HELD_OUT_SEED, 0, count, tuple(float(balls == i) for i in (1, 2, 3)))


def named_clips(prompts: tuple[str, ...]) -> Clips:
    """The clips that prompts without an image stand for."""
    scenes = [parse_prompt(prompt) for prompt in prompts]
    layouts = [default_layout(scene) for scene in scenes]
    return Clips(scenes, layouts, simulate(scenes, layouts))


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dev.training.evaluate", description=__doc__)
    parser.add_argument("weights", type=Path, help="a folder as written by python -m dev.training.train")
    parser.add_argument("--out", type=Path, required=True, help="folder for strips and evaluation.json")
    parser.add_argument("--balls", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--clips", type=int, default=8, help="per number of balls, of a set at most")
    parser.add_argument("--scenes", choices=list(SETS), help="a set of held-out scenes, instead of random ones")
    parser.add_argument("--skip", type=int, default=0, help="scenes of the set to leave out")
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    pipeline = load_pipeline(args.weights)
    pipeline.set_progress_bar_config(disable=True)
    records = {}
    if args.scenes:
        part = slice(args.skip, args.skip + args.clips)
        sets = {args.scenes: named_clips(SETS[args.scenes][part])}
    else:
        sets = {f"balls-{balls}": random_clips(balls, args.clips) for balls in args.balls}
    for name, clips in sets.items():
        records[name] = evaluate(
            pipeline,
            args.out / f"{name}.png",
            clips,
            seeds=[SEEDS[name]] * len(clips.scenes) if name in SEEDS else list(range(len(clips.scenes))),
            num_frames=args.frames,
            steps=args.steps,
        )
        (args.out / "evaluation.json").write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()

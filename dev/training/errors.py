"""The error of x0 by what the model sees of a clip: `python -m dev.training.errors DIR/weights`.

While a clip is sampled, the model sees all of its tokens. A cut that follows the ball betrays where it is:
the error of such a cut says little about what sampling will do, only that of whole clips does.
"""

import argparse
from pathlib import Path

import torch

from residua.world import load_pipeline
from residua.world.model import WorldModel

from .batches import BatchShape, choose_tokens, make_batch, near_tokens
from .clips import Clips, draw_clips
from .strips import HELD_OUT_SEED
from .trainer import VALIDATION_LEVELS, predict

ONE_BALL = (1.0, 0.0, 0.0)
CUTS = {
    "crops of a few frames": BatchShape(1, "crops", 192, 48),
    "crops of all frames": BatchShape(1, "crops", 1536, 64),
    "three frames": BatchShape(1, "frames", 1024),
    "whole clip": BatchShape(1, "all"),
}


@torch.no_grad()
def error_near_balls(model: WorldModel, shape: BatchShape, clip: Clips, level: float, seed: int) -> float:
    """Mean squared error of x0 over the tokens near ball and shadow of one clip, without those of the first frame;
    pixels are in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(model.transformer, shape, clip, generator, shift=3.0, drop_prompt=0.0, level=level)
    index = choose_tokens(shape, clip, torch.Generator().manual_seed(seed))
    near = near_tokens(shape, clip).gather(1, index) & ~batch.given  # [1, N]
    return float((predict(model, batch) - batch.clean)[near].square().mean())


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dev.training.errors", description=__doc__)
    parser.add_argument("weights", type=Path, help="a folder as written by python -m dev.training.train")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--levels", type=float, nargs="+", default=VALIDATION_LEVELS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    pipeline = load_pipeline(args.weights)
    model = WorldModel(pipeline.transformer, pipeline.prompt_table)
    for name, shape in CUTS.items():
        for level in args.levels:
            errors = [
                error_near_balls(model, shape, draw_clips(HELD_OUT_SEED, i, 1, ONE_BALL), level, seed=i)
                for i in range(args.clips)
            ]
            print(f"{name}, level {level}: {sum(errors) / len(errors):.4f}", flush=True)


if __name__ == "__main__":
    main()

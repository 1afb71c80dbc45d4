"""Trains the world model from scratch: `python -m dev.training.train --out DIR`.

Every step draws its batch from a generator seeded by (seed, step), so an interrupted and resumed run gives
the same result. DIR receives checkpoint.pt, weights/ (the EMA weights as a diffusers folder in fp16),
history.json, loss.png and strips/ (generated clips to look at).
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from residua.errors import InputError
from residua.tools.reports.figure import curves

from .strips import sample_strip
from .trainer import Recipe, Trainer


def run(trainer: Trainer, out: Path, *, stop: int | None = None, log_every: int = 50, strip_every: int = 250) -> None:
    """Trains until `stop` (or the recipe's end) and writes checkpoint, weights, plot and strips to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    last = min(stop or trainer.recipe.steps, trainer.recipe.steps)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    losses: list[float] = []
    start = time.perf_counter()
    # a bar on a terminal, plain lines elsewhere
    with Progress(*columns, TextColumn("{task.fields[note]}"), disable=not sys.stdout.isatty()) as bar:
        line = bar.add_task("training", total=last, completed=trainer.step, note="")
        while trainer.step < last:
            losses.append(trainer.train_step())
            trainer.seconds += time.perf_counter() - start
            start = time.perf_counter()
            bar.update(line, completed=trainer.step, note=f"loss {losses[-1]:.4f}")
            if trainer.step % log_every == 0 or trainer.step == last:
                record = {"step": trainer.step, "seconds": round(trainer.seconds), "loss": sum(losses) / len(losses)}
                record |= trainer.validate()
                trainer.history.append(record)
                text = " ".join(f"{key} {value:.5g}" for key, value in record.items())
                bar.console.print(text, highlight=False, soft_wrap=True)
                losses = []
                save(trainer, out)
            if strip_every and (trainer.step % strip_every == 0 or trainer.step == trainer.recipe.steps):
                trainer.save(out / f"checkpoint-{trainer.step:06d}.pt")
                path = out / "strips" / f"{trainer.step:06d}.png"
                pipeline = trainer.pipeline()
                pipeline.set_progress_bar_config(disable=True)
                stage, _ = trainer.recipe.stage_at(trainer.step - 1)
                quality = sample_strip(pipeline, path, balls=stage.balls)
                text = f"{path}: {quality:.1f} dB against the true clips"
                bar.console.print(text, highlight=False, soft_wrap=True)
            start = time.perf_counter()


def save(trainer: Trainer, out: Path) -> None:
    """Writes checkpoint, exported weights, history and plot."""
    trainer.save(out / "checkpoint.pt")
    trainer.export(out / "weights")
    (out / "history.json").write_text(json.dumps(trainer.history, indent=1))
    plot_history(trainer.history, out / "loss.png")


def plot_history(history: list[dict[str, float]], path: Path) -> None:
    """Plots training loss and validation errors over steps; skipped with a warning if matplotlib is
    missing."""
    keys = [key for key in history[-1] if key not in ("step", "seconds")]
    lines = {key: [(record["step"], record[key]) for record in history] for key in keys}
    title = "training loss; validation error by noise level (EMA weights)"
    try:
        path.write_bytes(curves({title: lines}, "step", "", log=True).png)
    except InputError as error:
        warnings.warn(f"no loss plot: {error}", stacklevel=2)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dev.training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, weights, plot and strips")
    parser.add_argument("--stop", type=int, help="stop after this step (the schedule stays the recipe's)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks (faster where bfloat16 is)")
    parser.add_argument("--resume", action="store_true", help="continue from DIR/checkpoint.pt if there is one")
    parser.add_argument("--start-from", type=Path, help="folder of weights to start from, instead of nothing")
    parser.add_argument("--at-step", type=int, default=0, help="the step that those weights stand at")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--strip-every", type=int, default=250, help="0: no strips")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message="Mismatch dtype")  # RMSNorm under autocast, once per process
    trainer = Trainer(Recipe(), compile_blocks=args.compile)
    checkpoint = args.out / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        trainer.load(checkpoint)
    elif checkpoint.exists():
        parser.error(f"{checkpoint} exists: pass --resume to continue it, or another --out")
    elif args.start_from:
        trainer.start_from(args.start_from, args.at_step)
    run(trainer, args.out, stop=args.stop, log_every=args.log_every, strip_every=args.strip_every)


if __name__ == "__main__":
    main()

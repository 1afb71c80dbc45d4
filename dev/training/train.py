"""Trains the world model from scratch: `python -m dev.training.train --out DIR`.

Every step draws its batch from a generator seeded by (seed, step), so an interrupted and resumed run gives
the same result. DIR receives checkpoint.pt, weights/ (the EMA weights as a diffusers folder in fp16),
history.json, loss.png and strips/ (generated clips to look at).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch

from .strips import sample_strip
from .trainer import Recipe, Trainer


class Reporter:
    """Shows progress: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, first: int, last: int) -> None:
        self.bar = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"))
            self.task = self.bar.add_task("training", total=last, completed=first, note="")
            self.bar.start()

    def advance(self, step: int, loss: float) -> None:
        """Called after every step."""
        if self.bar:
            self.bar.update(self.task, completed=step, note=f"loss {loss:.4f}")

    def say(self, line: str) -> None:
        """Prints a line."""
        if self.bar:
            self.bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Releases the terminal."""
        if self.bar:
            self.bar.stop()


def run(trainer: Trainer, out: Path, *, stop: int | None = None, log_every: int = 50, strip_every: int = 250) -> None:
    """Trains until `stop` (or the recipe's end) and writes checkpoint, weights, plot and strips to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    last = min(stop or trainer.recipe.steps, trainer.recipe.steps)
    reporter = Reporter(trainer.step, last)
    losses: list[float] = []
    start = time.perf_counter()
    try:
        while trainer.step < last:
            losses.append(trainer.train_step())
            trainer.seconds += time.perf_counter() - start
            start = time.perf_counter()
            reporter.advance(trainer.step, losses[-1])
            if trainer.step % log_every == 0 or trainer.step == last:
                record = {"step": trainer.step, "seconds": round(trainer.seconds), "loss": sum(losses) / len(losses)}
                record |= trainer.validate()
                trainer.history.append(record)
                reporter.say(" ".join(f"{key} {value:.5g}" for key, value in record.items()))
                losses = []
                save(trainer, out)
            if strip_every and (trainer.step % strip_every == 0 or trainer.step == trainer.recipe.steps):
                trainer.save(out / f"checkpoint-{trainer.step:06d}.pt")
                path = out / "strips" / f"{trainer.step:06d}.png"
                pipeline = trainer.pipeline()
                pipeline.set_progress_bar_config(disable=True)
                stage, _ = trainer.recipe.stage_at(trainer.step - 1)
                quality = sample_strip(pipeline, path, balls=stage.balls)
                reporter.say(f"{path}: {quality:.1f} dB against the true clips")
            start = time.perf_counter()
    finally:
        reporter.close()


def save(trainer: Trainer, out: Path) -> None:
    """Writes checkpoint, exported weights, history and plot."""
    trainer.save(out / "checkpoint.pt")
    trainer.export(out / "weights")
    (out / "history.json").write_text(json.dumps(trainer.history, indent=1))
    plot_history(trainer.history, out / "loss.png")


def plot_history(history: list[dict[str, float]], path: Path) -> None:
    """Plots training loss and validation errors over steps; skipped with a warning if matplotlib is
    missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("no loss plot: matplotlib is not installed", stacklevel=2)
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = [record["step"] for record in history]
    for key in [k for k in history[-1] if k not in ("step", "seconds")]:
        axes.plot(steps, [record[key] for record in history], label=key)
    axes.set(xlabel="step", yscale="log", title="training loss; validation error by noise level (EMA weights)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


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

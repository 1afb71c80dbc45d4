"""`residua capture`: records the attention calls of a real run on disk."""

from pathlib import Path
from typing import Annotated

import typer

from ...world.held_out import DEMO_PROMPT
from .app import command, console
from .options import Model, whole_numbers, words


@command(epilog="Example:  residua capture --model world --layers 0,2,4 --heads 0,1 --steps 6,7 --out captures")
def capture(
    context: typer.Context,
    model: Model = "world",
    layers: Annotated[str | None, typer.Option(help="Layer numbers or names; default: all.")] = None,
    heads: Annotated[str | None, typer.Option(help="Head numbers.")] = "0,1",
    steps: Annotated[
        str | None, typer.Option(help="Denoising steps to record, from 0; default: at 1/3 and 2/3.")
    ] = None,
    branches: Annotated[str | None, typer.Option(help="Guidance branches, such as cond; default: all.")] = None,
    run_steps: Annotated[int, typer.Option(min=1, help="Denoising steps of the run.")] = 20,
    size: Annotated[str, typer.Option(help="Pixels: one side, or width x height.")] = "64",
    frames: Annotated[int, typer.Option(min=1, help="Frames of the video.")] = 32,
    prompt: Annotated[str, typer.Option(help="What to show.")] = DEMO_PROMPT,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Largest size of the folder, in megabytes.")] = 1024,
    quick: Annotated[bool, typer.Option("--quick", help="Few steps of a clip with 4,096 tokens.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the capture.")] = Path("captures"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing capture.")] = False,
) -> None:
    """Record q, k, v of chosen layers, heads and steps while a pipeline generates, dense.

    Repeating the command adds what is missing; recording stops at the limit.
    """
    import torch

    from ..capture.recording import capture as record
    from ..capture.writer import clear_capture
    from ..generate import require_packages
    from ..generate.loading import PipelinePlacement, load
    from ..generate.run import Request, parse_size
    from .progress import counter

    require_packages()
    if quick:
        # 4,096 tokens of the model in the box: results from shorter calls say little
        size, frames, run_steps, steps = "64", 16, 4, steps or "1,2"
    recorded = [run_steps // 3, 2 * run_steps // 3] if steps is None else whole_numbers("steps", steps)
    request = Request(prompt, seed, run_steps, *parse_size(size), frames)
    pipe = load(model, PipelinePlacement())
    if force:
        clear_capture(out)
    arguments = request.arguments(pipe)
    pipe.set_progress_bar_config(disable=True)
    name = model if model == "world" else Path(model).name
    described = {
        "prompt": prompt,
        "seed": seed,
        "steps": run_steps,
        "size": size,
        "frames": frames,
        "torch": torch.__version__,
    }
    with counter("calls recorded") as tick:
        recorder = record(
            pipe,
            out,
            layers=_layers(layers),
            steps=sorted(set(recorded)),
            heads=None if heads is None else whole_numbers("heads", heads),
            branches=None if branches is None else words("branches", branches),
            limit_bytes=limit << 20,
            model=name,
            run=described,
            progress=tick,
            **arguments,
        )
    console.print(f"{out}: {len(recorder.writer)} calls, {recorder.writer.bytes / 2**20:.1f} MB", soft_wrap=True)
    if recorder.full:
        console.print(f"stopped at the limit of {limit} MB; raise --limit to go on", soft_wrap=True)
    for reason in sorted(recorder.skipped):
        console.print(f"not recorded: {reason}", soft_wrap=True, markup=False)


def _layers(text: str | None) -> list[int | str] | None:
    if text is None:
        return None
    return [int(part) if part.lstrip("-").isdigit() else part for part in words("layers", text)]

"""`residua plan`: what a generation will cost, dense and sparse, before anyone waits for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .app import command, console, readable_errors, writable


@command(epilog="Example:  residua plan wan2.2-i2v-a14b --size 1280x720 --frames 81 --steps 50 --gpu h100")
def plan(
    model: Annotated[str, typer.Argument(help="A model, or a local config.json; an unknown name lists all.")],
    size: Annotated[str | None, typer.Option(help="Width x height in pixels, such as 1280x720.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of the video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    density: Annotated[float | None, typer.Option(help="Share of the pairs; default: the preset's.")] = None,
    gpu: Annotated[str, typer.Option(help="An unknown name lists all.")] = "h100",
    json_path: Annotated[
        str | None, typer.Option("--json", help="Write JSON to this file, or to - for standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Estimate tokens, FLOPs, memory and time of a generation from a stated cost model; nothing is run."""
    with readable_errors():
        from ..bench.attention import write_json
        from ..plan import make_plan

        target = None if json_path in (None, "-") else writable(Path(str(json_path)), force)
        made = make_plan(model, size=size, frames=frames, steps=steps, density=density, gpu=gpu)
        if json_path == "-":
            typer.echo(json.dumps(made.to_dict(), indent=2))
            return
        from ..plan.render import render

        console.print(render(made))
        if target is not None:
            write_json(target, made.to_dict())

"""`residua plan`: estimates what a generation will cost, dense and sparse, without running it."""

from pathlib import Path
from typing import Annotated

import typer

from ...util import json_text
from ..output import write_json
from .app import command, show, writable


@command(
    epilog="Examples:  residua plan wan2.2 --gpu rtx4090 --offload model;  residua plan "
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers --quality fast;  residua plan wan2.2-i2v-a14b --steps 50 --paper"
)
def plan(
    model: Annotated[str, typer.Argument(help="A name, a hub id or a local config.json; an unknown name lists all.")],
    size: Annotated[str | None, typer.Option(help="Width x height in pixels, such as 1280x720.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of the video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    quality: Annotated[str | None, typer.Option(help="faithful, balanced or fast.", show_default="balanced")] = None,
    density: Annotated[float | None, typer.Option(help="A fixed density instead of a quality.")] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's method, with its dense first steps and layers.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="h100, rtx4090, l40s, ...; an unknown name lists all.")] = "h100",
    offload: Annotated[str, typer.Option(help="none, model or sequential.")] = "none",
    json_path: Annotated[
        str | None, typer.Option("--json", help="Write JSON to this file, or to - for standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Estimate tokens, FLOPs, memory and time of a generation as `accelerate` runs it; nothing is run."""
    from ..plan import make_plan

    target = None if json_path in (None, "-") else writable(Path(str(json_path)), force)
    made = make_plan(model, size, frames, steps, density, gpu, quality=quality, paper=paper, offload=offload)
    if json_path == "-":
        typer.echo(json_text.dumps(made.to_dict(), indent=2))
        return
    from ..plan.render import render

    try:
        show(render(made))
    finally:  # whoever reads the table may have closed the pipe, as `head` does
        if target is not None:
            write_json(target, made.to_dict())

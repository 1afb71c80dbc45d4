"""`residua demo`: the same video with dense and sparse attention, from the model in the box."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from ...world.held_out import DEMO_PROMPT
from .app import command, console, readable_errors, show
from .options import RECONSTRUCTIONS, ForceFolder, LpipsWeights, NoFloor, alone, command_line, count_or_share

FOLDER = Path("residua-demo")
FPS = 16  # a clip of 32 frames is two seconds, as simulated


@command(
    epilog="Example:  residua demo --quality fast "
    "--prompt 'a blue rubber ball lobbed left on a slate floor in the evening'"
)
def demo(
    context: typer.Context,
    quality: Annotated[str | None, typer.Option(help="faithful, balanced or fast.", show_default="balanced")] = None,
    density: Annotated[
        float | None, typer.Option(help="Instead of a quality: share of dense attention that every head may spend.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Bound on every head's error; each head spends at most --density.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 8,
    size: Annotated[str, typer.Option(help="Pixels: one side, or width x height; multiples of 4.")] = "64",
    frames: Annotated[int, typer.Option(min=1, help="Frames; each has (size / 4)^2 tokens.")] = 32,
    prompt: Annotated[str, typer.Option(help="From the model's small vocabulary.")] = DEMO_PROMPT,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise, the same for both videos.")] = 0,
    reconstruction: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(RECONSTRUCTIONS)}.", show_default="anchored")
    ] = None,
    dense_steps: Annotated[str, typer.Option(help="First steps that stay dense: 2, or a share.")] = "0",
    dense_layers: Annotated[str, typer.Option(help="First layers that stay dense: 1, or a share.")] = "0",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kind; the median counts.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; 1 is best on a busy machine.")] = None,
    no_dense: Annotated[bool, typer.Option("--no-dense", help="Generate only the sparse video.")] = False,
    no_floor: NoFloor = False,
    model: Annotated[Path | None, typer.Option(help="Folder of other weights for the model.")] = None,
    lpips: LpipsWeights = None,
    out: Annotated[Path, typer.Option(help="Folder for videos and report.")] = FOLDER,
    force: ForceFolder = False,
) -> None:
    """Generate a video twice from one seed, dense and sparse, and write both with a report."""
    with readable_errors():
        _demo(context, SimpleNamespace(**context.params))


def _demo(context: typer.Context, given: SimpleNamespace) -> None:
    # Imported here, so that other commands do not wait for it.
    import torch

    from ...config import Config
    from ...hosts import Settings
    from ...util.files import check_folder, publish_folder
    from ..generate import require_packages
    from ..generate.compare import compare
    from ..generate.comparison import machine
    from ..generate.loading import WORLD, Placement, load
    from ..generate.page import result_files
    from ..generate.run import Request, parse_size
    from ..metrics.video_quality import find_lpips
    from .progress import step_bars
    from .summary import busy, summary

    require_packages()
    # A second `residua demo` may replace the files of the first one, and nothing else.
    check_folder(given.out, given.force, reuse=given.out == FOLDER)
    request = Request(given.prompt, given.seed, given.steps, *parse_size(given.size), given.frames)
    alone(given.quality, density=given.density, max_error=given.max_error, reconstruction=given.reconstruction)
    dials = (given.density, given.max_error, given.reconstruction)
    # The default is that of `accelerate(pipe)`.
    quality = given.quality or ("balanced" if all(dial is None for dial in dials) else None)
    settings = Settings(
        Config() if quality is None else None,  # the method's defaults, not a family's preset
        given.density,
        quality=quality,
        max_error=given.max_error,
        reconstruction=given.reconstruction,
        dense_steps=count_or_share("dense-steps", given.dense_steps),
        dense_layers=count_or_share("dense-layers", given.dense_layers),
        min_tokens=0,  # a demo must be sparse even if it is small
    )
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    load_before = machine()["load"]
    lpips = find_lpips(given.lpips)
    pipe = load(str(given.model or WORLD), Placement(device="cpu"))
    name = WORLD if given.model is None else f"{WORLD}, weights from {given.model.name}"
    with step_bars() as watch:
        found = compare(
            pipe,
            name,
            request,
            settings,
            lpips=lpips,
            watch=watch,
            dense=not given.no_dense,
            repeats=given.repeats,
            floor=not given.no_floor,
        )
    publish_folder(given.out, result_files(found, FPS, command_line(context)))
    show(summary(found))
    disturbed = busy(found.waiting, load_before, torch.get_num_threads())
    if disturbed is not None:
        console.print(
            f"{disturbed}: processor time is the fairer figure, and --repeats 3 --threads 1 makes both fairer."
        )
    console.print(f"wrote {given.out}/ : open {given.out / 'report.html'} in a browser", soft_wrap=True)

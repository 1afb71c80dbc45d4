"""`residua demo`: the same video with dense and sparse attention, from the model in the box."""

from pathlib import Path
from typing import Annotated

import typer

from ...world.held_out import DEMO_PROMPT
from .app import command, console, show
from .options import ForceFolder, LpipsWeights, MethodOptions, NoFloor, command_line, count_or_share

FOLDER = Path("residua-demo")
FPS = 16  # a clip of 32 frames is two seconds, as simulated


@command(
    epilog="Example:  residua demo --quality fast "
    "--prompt 'a blue rubber ball lobbed left on a slate floor in the evening'"
)
def demo(
    context: typer.Context,
    method: MethodOptions,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 8,
    size: Annotated[str, typer.Option(help="Pixels: one side, or width x height; multiples of 4.")] = "64",
    frames: Annotated[int, typer.Option(min=1, help="Frames; each has (size / 4)^2 tokens.")] = 32,
    prompt: Annotated[str, typer.Option(help="From the model's small vocabulary.")] = DEMO_PROMPT,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise, the same for both videos.")] = 0,
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
    # Imported here, so that other commands do not wait for it.
    import torch

    from ...config import Config
    from ...hosts import Settings
    from ...hosts.quality import DEFAULT_QUALITY
    from ..generate import require_packages
    from ..generate.compare import compare
    from ..generate.comparison import machine
    from ..generate.loading import WORLD, PipelinePlacement, load
    from ..generate.page import result_files
    from ..generate.run import Request, parse_size
    from ..metrics.video_quality import find_lpips
    from ..output import check_folder, publish_folder
    from .progress import step_bars
    from .summary import busy, summary

    require_packages()
    # A second `residua demo` may replace the files of the first one, and nothing else.
    check_folder(out, force, reuse=out == FOLDER)
    request = Request(prompt, seed, steps, *parse_size(size), frames)
    asked = method.given()
    if all(value is None for value in asked.values()):
        asked["quality"] = DEFAULT_QUALITY  # as in `accelerate(pipe)`
    settings = Settings(
        Config() if asked["quality"] is None else None,  # the method's defaults, not a family's preset
        **asked,
        dense_steps=count_or_share("dense-steps", dense_steps),
        dense_layers=count_or_share("dense-layers", dense_layers),
        min_tokens=0,  # a demo must be sparse even if it is small
    )
    if threads is not None:
        torch.set_num_threads(threads)
    load_before = machine()["load"]
    distance = find_lpips(lpips)
    pipe = load(str(model or WORLD), PipelinePlacement(device="cpu"))
    name = WORLD if model is None else f"{WORLD}, weights from {model.name}"
    with step_bars() as watch:
        found = compare(
            pipe,
            name,
            request,
            settings,
            lpips=distance,
            watch=watch,
            dense=not no_dense,
            repeats=repeats,
            noise_floor=not no_floor,
        )
    publish_folder(out, result_files(found, FPS, command_line(context)))
    show(summary(found))
    disturbed = busy(found.waiting, load_before, torch.get_num_threads())
    if disturbed is not None:
        console.print(
            f"{disturbed}: processor time is the fairer figure, and --repeats 3 --threads 1 makes both fairer."
        )
    console.print(f"wrote {out}/ : open {out / 'report.html'} in a browser", soft_wrap=True)

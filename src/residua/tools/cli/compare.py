"""`residua compare`: quality and efficiency over many settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InputError
from ...world.held_out import DEMO_PROMPT, SEEDS, SETS
from .app import command, console, figures, readable_errors, show
from .options import (
    DenseLayers,
    DenseSteps,
    Device,
    Dtype,
    ForceFolder,
    Frames,
    LpipsWeights,
    MinTokens,
    Model,
    NoFloor,
    Offload,
    Prompts,
    Size,
    Steps,
    clip_shape,
    command_line,
    dense_parts,
    numbers,
    words,
)

if TYPE_CHECKING:
    from ..generate.run import Request

# Columns that fit a terminal of 80 columns; the files have more.
SHOWN = {
    "cost": "cost",
    "psnr": "PSNR\ndB",
    "ssim": "SSIM",
    "gmsd": "GMSD",
    "lpips": "LPIPS",
    "error": "error",
    "speedup": "speed\n-up",
}
METHODS_DENSITY = 0.22  # with --methods, unless --densities says otherwise


@command(epilog="Example:  residua compare --model world --densities 0.12,0.22 --reconstructions probe,anchored")
def compare(
    context: typer.Context,
    model: Model = "world",
    densities: Annotated[str, typer.Option(help="Comma separated; or none.")] = "0.12,0.17,0.22,0.28,0.35",
    partitions: Annotated[str, typer.Option(help="Comma separated.")] = "semantic,response",
    reconstructions: Annotated[str, typer.Option(help="Comma separated.")] = "none,probe,anchored",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Compare whole methods instead, at the first of --densities: dense,sparge,svg2,svoo,"
            "svg-ear,paper,anchored and others."
        ),
    ] = None,
    max_errors: Annotated[
        str | None, typer.Option(help="Also these error bounds; each may spend the largest of --densities.")
    ] = None,
    qualities: Annotated[str | None, typer.Option(help="Also these: faithful, balanced, fast.")] = None,
    prompt: Prompts = None,
    scenes: Annotated[
        str | None,
        typer.Option(help="Prompts of the model in the box: tuning, report, or the first few, such as report:4."),
    ] = None,
    size: Size = None,
    frames: Frames = None,
    steps: Steps = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: 0; with --scenes, that of the scenes.")] = None,
    dense_steps: DenseSteps = None,
    dense_layers: DenseLayers = None,
    min_tokens: MinTokens = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    offload: Offload = "none",
    lpips: LpipsWeights = None,
    no_floor: NoFloor = False,
    pbench: Annotated[
        Path | None, typer.Option(help="PBench scores by method (JSON), for --methods; PBench itself is not run.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare.md, .json, .png.")] = Path("residua-compare"),
    force: ForceFolder = False,
) -> None:
    """Generate dense once per prompt and sparse with every setting; write a table, JSON and a plot."""
    with readable_errors():
        given = SimpleNamespace(**context.params)
        (_compare if methods is None else _compare_methods)(context, given)


def _compare(context: typer.Context, given: SimpleNamespace) -> None:
    # Imported here, so that other commands do not wait for it.
    from ...util.files import check_folder, publish_folder
    from ..generate import loading, require_packages, tradeoff
    from ..metrics.video_quality import find_lpips
    from .progress import step_bars

    require_packages()
    check_folder(given.out, given.force)
    todo = tradeoff.settings(
        [] if given.densities == "none" else numbers("densities", given.densities),
        words("partitions", given.partitions),
        words("reconstructions", given.reconstructions),
        dense_parts(given),
        [] if given.max_errors is None else numbers("max-errors", given.max_errors),
        [] if given.qualities is None else words("qualities", given.qualities),
    )
    requests = _requests(given)
    lpips = find_lpips(given.lpips)
    pipe = loading.load(given.model, loading.Placement(given.device, given.dtype, given.offload))
    facts = {
        "model": given.model,
        "prompts": [one.prompt for one in requests],
        "seed": requests[0].seed,
        "steps": given.steps,
        "command": command_line(context),
        "lpips_not_measured": lpips if isinstance(lpips, str) else None,
    }
    with step_bars() as watch:
        # Written after every setting: a long run that is interrupted keeps its results.
        for rows, tokens in tradeoff.rows_so_far(
            pipe, given.model, requests, todo, lpips, watch, floor=not given.no_floor
        ):
            publish_folder(given.out, tradeoff.result_files(rows, {**facts, "tokens": tokens}))
    shown = [name for name in SHOWN if any(getattr(row, name) is not None for row in rows)]
    columns = [SHOWN[name] for name in shown]
    table = figures(f"{given.model}: quality against efficiency", "setting", *columns)
    for row in rows:
        table.add_row(row.name, *tradeoff.cells(row, shown))
    show(table)
    for other in tradeoff.physics_tables(rows):
        show(other.rich())
    for remark in tradeoff.floor_remarks(rows):
        console.print(f"dense again: {remark}", soft_wrap=True)
    console.print(f"wrote {', '.join(str(given.out / name) for name in tradeoff.FILES)}", soft_wrap=True)


def _compare_methods(context: typer.Context, given: SimpleNamespace) -> None:
    # Imported here, so that other commands do not wait for it.
    from ...util.files import check_folder, publish_folder
    from ..generate import loading, method_table, require_packages
    from ..generate.flops import UNITS
    from ..metrics.video_quality import find_lpips
    from .progress import step_bars

    require_packages()
    check_folder(given.out, given.force)
    given_densities = context.get_parameter_source("densities")
    by_default = given_densities is not None and given_densities.name == "DEFAULT"
    density = METHODS_DENSITY if by_default else numbers("densities", given.densities)[0]
    settings = {
        name: replace(dense_parts(given), density=density, method=name)
        for name in method_table.chosen_methods(words("methods", given.methods))
    }
    pbench = method_table.read_pbench(given.pbench)
    requests = _requests(given)
    lpips = find_lpips(given.lpips)
    placement = loading.Placement(given.device, given.dtype, given.offload)
    device = placement.torch_device.type
    pipe = loading.load(given.model, placement)
    facts = {
        "model": given.model,
        "density": density,
        "prompts": [one.prompt for one in requests],
        "seed": requests[0].seed,
        "steps": given.steps,
    }
    unused = ["partitions", "reconstructions", "max_errors", "qualities", *(["densities"] if by_default else [])]
    command = command_line(context, ("out", "force", *unused))
    with step_bars() as watch:
        for found in method_table.measure(
            pipe,
            given.model,
            requests,
            settings,
            lpips,
            watch,
            time_stages=device == "cpu",
            device=device,
            pbench=pbench,
            floor=not given.no_floor,
        ):
            publish_folder(given.out, method_table.result_files(found, facts, command))
    report = method_table.make_report(found, facts, command)
    for table in report.tables:
        show(table.rich(leave_out=("density", *UNITS)))
    for name, reason in found.not_measured.items():
        console.print(f"{name}: {reason}", markup=False, soft_wrap=True)
    console.print(f"wrote {given.out}/ : open {given.out / 'report.html'} in a browser", soft_wrap=True)


def _requests(given: SimpleNamespace) -> list[Request]:
    from ..generate.run import Request

    prompts, seed = given.prompt or [DEMO_PROMPT], 0
    if given.scenes is not None:
        if given.prompt:
            raise InputError("--scenes together with --prompt: leave one of them out")
        prompts, seed = held_out(given.scenes)
    seed = seed if given.seed is None else given.seed
    return [Request(text, seed, *clip_shape(given)) for text in prompts]


def held_out(text: str) -> tuple[list[str], int]:
    """The prompts of 'report', or the first 4 of 'report:4', and the seed of the noise."""
    name, _, count = text.partition(":")
    if name not in SETS or (count and not (count.isdigit() and 1 <= int(count) <= len(SETS[name]))):
        known = ", ".join(f"{name} ({len(prompts)})" for name, prompts in SETS.items())
        raise InputError(f"--scenes {text!r}: wanted one of {known}, or the first of them such as report:4")
    return list(SETS[name])[: int(count) if count else None], SEEDS[name]

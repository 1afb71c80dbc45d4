"""`residua compare`: quality and efficiency over many settings, or over whole methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError
from ...world.held_out import DEMO_PROMPT, SEEDS, SETS
from .app import command, console, show
from .options import ForceFolder, Model, PipelineOptions, Prompts, command_line, numbers, words

if TYPE_CHECKING:
    from ..generate.run import Request

METHODS_DENSITY = 0.22  # with --methods, unless --densities says otherwise


@command(epilog="Example:  residua compare --model world --densities 0.12,0.22 --reconstructions probe,anchored")
def compare(
    context: typer.Context,
    *,
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
    seed: Annotated[int | None, typer.Option(min=0, help="Default: 0; with --scenes, that of the scenes.")] = None,
    pipeline: PipelineOptions,
    pbench: Annotated[
        Path | None, typer.Option(help="PBench scores by method (JSON), for --methods; PBench itself is not run.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare.md, .json, .png.")] = Path("residua-compare"),
    force: ForceFolder = False,
) -> None:
    """Generate dense once per prompt and sparse with every setting; write a table, JSON and a plot."""
    # Imported here, so that other commands do not wait for it.
    from ..generate import loading, method_table, require_packages, tradeoff
    from ..generate.averages import ClipSet
    from ..generate.flops import UNITS
    from ..metrics.video_quality import find_lpips
    from ..output import check_folder, publish_folder
    from .progress import step_bars

    require_packages()
    check_folder(out, force)
    unused: tuple[str, ...] = ()
    if methods is None:
        todo = tradeoff.all_settings(
            [] if densities == "none" else numbers("densities", densities),
            words("partitions", partitions),
            words("reconstructions", reconstructions),
            pipeline.settings(),
            [] if max_errors is None else numbers("max-errors", max_errors),
            [] if qualities is None else words("qualities", qualities),
        )
    else:
        density, unused = _density(context, densities)
        names = method_table.chosen_methods(words("methods", methods))
        todo = [(name, pipeline.settings(density=density, method=name)) for name in names]
    scores = method_table.read_pbench(pbench)
    requests = _requests(prompt, scenes, seed, pipeline.shape())
    facts = {
        "model": model,
        "prompts": [one.prompt for one in requests],
        "seed": requests[0].seed,
        "steps": pipeline.steps,
        "command": command_line(context, ("out", "force", *unused)),
    }
    lpips = find_lpips(pipeline.lpips)
    placement = pipeline.placement()
    device = placement.torch_device.type
    pipe = loading.load(model, placement)
    with step_bars() as watch:
        # Written after every setting: a long run that is interrupted keeps its results.
        clips = ClipSet.generate(
            pipe,
            model,
            requests,
            todo[0][1],
            lpips,
            watch,
            noise_floor=not pipeline.no_floor,
            split=methods is not None,
        )
        if methods is None:
            facts["lpips_not_measured"] = lpips if isinstance(lpips, str) else None
            for rows, found in clips.rows_so_far(todo):
                facts["tokens"] = found[0].tokens
                publish_folder(out, tradeoff.result_files(rows, facts))
        else:
            facts["density"] = density
            for measured in method_table.measure(clips, todo, device=device, pbench=scores):
                report = method_table.methods_page(measured, facts)
                publish_folder(out, report.files())
    if methods is None:
        for table in tradeoff.tables(rows, f"{model}: quality against efficiency"):
            show(table.rich(leave_out=(*tradeoff.WIDE, *UNITS)))
        for remark in tradeoff.floor_remarks(rows):
            console.print(f"dense again: {remark}", soft_wrap=True)
        console.print(f"wrote {', '.join(str(out / name) for name in tradeoff.FILES)}", soft_wrap=True)
    else:
        for table in report.tables:
            show(table.rich(leave_out=("density", *UNITS)))
        for name, reason in measured.not_measured.items():
            console.print(f"{name}: {reason}", markup=False, soft_wrap=True)
        console.print(f"wrote {out}/ : open {out / 'report.html'} in a browser", soft_wrap=True)


def _density(context: typer.Context, densities: str) -> tuple[float, tuple[str, ...]]:
    """The density at which methods are compared, and the options that have no meaning then."""
    given, unused = context.get_parameter_source("densities"), ("partitions", "reconstructions", "max_errors")
    if given is not None and given.name == "DEFAULT":
        return METHODS_DENSITY, (*unused, "qualities", "densities")
    return numbers("densities", densities)[0], (*unused, "qualities")


def _requests(prompts: list[str] | None, scenes: str | None, seed: int | None, shape: dict[str, Any]) -> list[Request]:
    from ..generate.run import Request

    texts, usual_seed = prompts or [DEMO_PROMPT], 0
    if scenes is not None:
        if prompts:
            raise InputError("--scenes together with --prompt: leave one of them out")
        texts, usual_seed = held_out(scenes)
    return [Request(text, usual_seed if seed is None else seed, **shape) for text in texts]


def held_out(text: str) -> tuple[list[str], int]:
    """The prompts of 'report', or the first 4 of 'report:4', and the seed of the noise."""
    name, _, count = text.partition(":")
    if name not in SETS or (count and not (count.isdigit() and 1 <= int(count) <= len(SETS[name]))):
        known = ", ".join(f"{name} ({len(prompts)})" for name, prompts in SETS.items())
        raise InputError(f"--scenes {text!r}: wanted one of {known}, or the first of them such as report:4")
    return list(SETS[name])[: int(count) if count else None], SEEDS[name]

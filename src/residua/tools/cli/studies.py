"""The studies of captured calls: `residua analyze`, `ablate`, `reconstructions`, `budgets` and `baselines`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError
from .app import command
from .options import BackendName, ForceFolder, command_line, words

if TYPE_CHECKING:
    from ...config import Config
    from ..reports.page import Page

ANALYSIS = Path("residua-analyze")
ABLATION = Path("residua-ablate")
RECONSTRUCTION = Path("residua-reconstructions")
BUDGETS = Path("residua-budgets")
BASELINES = Path("residua-baselines")
WRITTEN_AGAIN = (ANALYSIS, ABLATION, RECONSTRUCTION, BUDGETS)  # without --force, if Residua wrote them
SETTINGS = ("density", "query_groups", "kv_groups", "backend", "rules")  # options of the studies that a Config has too

Captures = Annotated[Path, typer.Argument(help="Folder that `residua capture` wrote.")]
Density = Annotated[float, typer.Option(help="Share of the pairs that may be evaluated.")]
Groups = Annotated[int | None, typer.Option(min=1, help="Default: chosen from the number of tokens.")]
RulesName = Annotated[str | None, typer.Option("--rules", help="cpu or gpu; default: those of the device.")]
Quick = Annotated[bool, typer.Option("--quick", help="Four calls and fewer settings.")]
Out = Annotated[Path, typer.Option(help="Folder for the report.")]


@command(epilog="Example:  residua analyze captures --out residua-analyze")
def analyze(
    context: typer.Context,
    captures: Captures,
    density: Density = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    rules: RulesName = None,
    quick: Quick = False,
    out: Out = ANALYSIS,
    force: ForceFolder = False,
) -> None:
    """Measure support, kept mass against error, and affine residuals (the paper's section 3)."""
    from ..studies.diagnostics import analyze as study

    run_study(study, context, settings(context, paper=True))


@command(epilog="Example:  residua ablate captures --out residua-ablate")
def ablate(
    context: typer.Context,
    captures: Captures,
    density: Density = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    rules: RulesName = None,
    quick: Quick = False,
    out: Out = ABLATION,
    force: ForceFolder = False,
) -> None:
    """Measure partition, reconstruction, density, probes and k-means steps (the paper's Tables 2-4)."""
    from ..studies.ablations import ablate as study

    run_study(study, context, settings(context, paper=True))


@command(epilog="Example:  residua reconstructions captures --out residua-reconstructions")
def reconstructions(
    context: typer.Context,
    captures: Captures,
    density: Annotated[float, typer.Option(help="Density at which the parts of anchored are compared.")] = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    rules: RulesName = None,
    quick: Quick = False,
    out: Out = RECONSTRUCTION,
    force: ForceFolder = False,
) -> None:
    """Compare reconstructions at equal cost, the parts of "anchored", and the estimates of the error."""
    from ..studies.reconstructions import compare_reconstructions

    run_study(compare_reconstructions, context, settings(context))


@command(epilog="Example:  residua budgets captures --out residua-budgets")
def budgets(
    context: typer.Context,
    captures: Captures,
    backend: BackendName = "auto",
    rules: RulesName = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only one budget.")] = False,
    out: Out = BUDGETS,
    force: ForceFolder = False,
) -> None:
    """Compare one budget shared by all heads with the same density for each, at 2 to 8 % on average."""
    from ..studies.budgets import compare_budgets

    run_study(compare_budgets, context, settings(context))


@command(epilog="Example:  residua baselines captures/ --density 0.22 --methods svg2,svg-ear,paper --quick")
def baselines(
    context: typer.Context,
    captures: Annotated[Path, typer.Argument(help="Captured calls: safetensors, with or without a manifest.")],
    density: Density = 0.22,
    methods: Annotated[str | None, typer.Option(help="Comma separated; default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method; the median counts.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: PyTorch's.")] = None,
    backend: Annotated[str, typer.Option(help="Attention backend for all methods, or auto.")] = "auto",
    rules: RulesName = None,
    groups: Annotated[str | None, typer.Option(help="Query and K/V groups of all methods, such as 64,128.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="At most 4 calls.")] = False,
    out: Out = BASELINES,
    force: ForceFolder = False,
) -> None:
    """Compare training-free sparse attention at matched density: error, pairs, products and time."""
    import torch

    from ..studies.baselines import chosen_methods, compare_baselines

    chosen = chosen_methods(None if methods is None else words("methods", methods))
    query_groups, kv_groups = (None, None) if groups is None else _two_counts(groups)
    config = settings(context).replace(query_groups=query_groups, kv_groups=kv_groups)
    if threads is not None:
        torch.set_num_threads(threads)
    run_study(compare_baselines, context, config, methods=chosen, repeats=repeats)


def _two_counts(groups: str) -> tuple[int, int]:
    parts = words("groups", groups)
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--groups {groups!r}: wanted two whole numbers, such as 64,128")
    return int(parts[0]), int(parts[1])


def settings(context: typer.Context, paper: bool = False) -> Config:
    """The default method, or the paper's, with the options of the study that are settings of a Config."""
    from ...config import Config

    given = {name: context.params[name] for name in SETTINGS if context.params.get(name) is not None}
    return Config.paper(**given) if paper else Config(**given)


def run_study(study: Callable[..., Page], context: typer.Context, config: Config, **more: Any) -> None:
    """Reads the captures that the command names, studies them and publishes the report."""
    from ...util.files import check_folder
    from ..capture.captures import read_captures
    from .lab_progress import call_bar, publish

    captures, out = context.params["captures"], context.params["out"]
    check_folder(out, context.params["force"], reuse=out in WRITTEN_AGAIN)
    calls = read_captures(captures)
    with call_bar() as watch:
        shown = f"{command_line(context)} {captures.name}"
        page = study(calls, config, shown, context.params["quick"], watch, **more)
    publish(page, out)

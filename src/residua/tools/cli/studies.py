"""The studies of captured calls: `residua analyze`, `ablate`, `reconstructions`, `budgets` and `rivals`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InputError
from .app import command, readable_errors
from .options import BackendName, ForceFolder, command_line, words

if TYPE_CHECKING:
    from ...config import Config

ANALYSIS = Path("residua-analyze")
ABLATION = Path("residua-ablate")
RECONSTRUCTIONS = Path("residua-reconstructions")
BUDGETS = Path("residua-budgets")
QUICK_CALLS = 4

Captures = Annotated[Path, typer.Argument(help="Folder that `residua capture` wrote.")]
Density = Annotated[float, typer.Option(help="Share of the pairs that may be evaluated.")]
Groups = Annotated[int | None, typer.Option(min=1, help="Default: chosen from the number of tokens.")]
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
    quick: Quick = False,
    out: Out = ANALYSIS,
    force: ForceFolder = False,
) -> None:
    """Measure support, kept mass against error, and affine residuals (the paper's section 3)."""
    with readable_errors():
        run_study("analyze", context, _paper(context), quick, out, force)


@command(epilog="Example:  residua ablate captures --out residua-ablate")
def ablate(
    context: typer.Context,
    captures: Captures,
    density: Density = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    quick: Quick = False,
    out: Out = ABLATION,
    force: ForceFolder = False,
) -> None:
    """Measure partition, reconstruction, density, probes and k-means steps (the paper's Tables 2-4)."""
    with readable_errors():
        run_study("ablate", context, _paper(context), quick, out, force)


@command(epilog="Example:  residua reconstructions captures --out residua-reconstructions")
def reconstructions(
    context: typer.Context,
    captures: Captures,
    density: Annotated[float, typer.Option(help="Density at which the parts of anchored are compared.")] = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    quick: Quick = False,
    out: Out = RECONSTRUCTIONS,
    force: ForceFolder = False,
) -> None:
    """Compare reconstructions at equal cost, the parts of "anchored", and the estimates of the error."""
    with readable_errors():
        from ...config import Config

        config = Config(density=density, query_groups=query_groups, kv_groups=kv_groups, backend=backend)
        run_study("reconstructions", context, config, quick, out, force)


@command(epilog="Example:  residua budgets captures --out residua-budgets")
def budgets(
    context: typer.Context,
    captures: Captures,
    backend: BackendName = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Only one budget.")] = False,
    out: Out = BUDGETS,
    force: ForceFolder = False,
) -> None:
    """Compare one budget shared by all heads with the same density for each, at 2 to 8 % on average."""
    with readable_errors():
        from ...config import Config

        run_study("budgets", context, Config(backend=backend), quick, out, force)


@command(epilog="Example:  residua rivals captures/ --density 0.22 --methods svg2,svg-ear,paper --quick")
def rivals(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Captured calls: safetensors, with or without a manifest.")],
    density: Density = 0.22,
    methods: Annotated[str | None, typer.Option(help="Comma separated; default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method; the median counts.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: PyTorch's.")] = None,
    backend: Annotated[str, typer.Option(help="Attention backend for all methods, or auto.")] = "auto",
    groups: Annotated[str | None, typer.Option(help="Query and K/V groups of all methods, such as 64,128.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"At most {QUICK_CALLS} calls.")] = False,
    out: Out = Path("residua-rivals"),
    force: ForceFolder = False,
) -> None:
    """Compare training-free sparse attention at matched density: error, pairs, products and time."""
    with readable_errors():
        _rivals(context, SimpleNamespace(**context.params))


def _rivals(context: typer.Context, given: SimpleNamespace) -> None:
    # Imported here, so that other commands do not wait for it.
    import torch

    from ...baselines import find
    from ...config import Config
    from ...util.files import check_folder
    from ..capture.captures import read_captures
    from ..studies.baselines.measure import StudySettings, measure_all
    from ..studies.baselines.report import make_report
    from .lab_progress import call_bar, publish

    check_folder(given.out, given.force)
    chosen = find(None if given.methods is None else words("methods", given.methods))
    settings = StudySettings(Config(density=given.density).density, given.repeats, given.backend, _groups(given.groups))
    calls = read_captures(given.folder)
    if given.quick:
        calls = calls[:: -(-len(calls) // QUICK_CALLS)]
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    with call_bar() as watch:
        found, refused = measure_all(calls, chosen, settings, watch)
    command = f"{command_line(context)} {given.folder.name}"
    publish(make_report(found, refused, settings, command), given.out)


def _groups(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = words("groups", text)
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--groups {text!r}: wanted two whole numbers, such as 64,128")
    return int(parts[0]), int(parts[1])


def _paper(context: typer.Context) -> Config:
    """The paper's method with the options of `analyze` and `ablate`."""
    from ...config import Config

    given = {name: context.params[name] for name in ("density", "backend", "query_groups", "kv_groups")}
    return Config.paper(**given)


def run_study(name: str, context: typer.Context, config: Config, quick: bool, out: Path, force: bool) -> None:
    """Reads the captures that the command names, studies them and publishes the report."""
    # Imported here, so that other commands do not wait for it.
    from ...util.files import check_folder
    from ..capture.captures import read_captures
    from ..studies.ablations.report import ablate as ablation
    from ..studies.budgets.report import compare_budgets
    from ..studies.diagnostics.report import analyze as analysis
    from ..studies.reconstructions.report import compare_reconstructions
    from .lab_progress import call_bar, publish

    study = {
        "analyze": analysis,
        "ablate": ablation,
        "reconstructions": compare_reconstructions,
        "budgets": compare_budgets,
    }[name]
    check_folder(out, force, reuse=out in (ANALYSIS, ABLATION, RECONSTRUCTIONS, BUDGETS))
    captures = context.params["captures"]
    calls = read_captures(captures)
    with call_bar() as watch:
        report = study(calls, config, f"{command_line(context)} {captures.name}", quick, watch)
    publish(report, out)

"""`residua analyze` and `residua ablate`: the paper's diagnostics and tables on captured calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import Config
from .app import app, readable_errors
from .options import command_line

ANALYSIS = Path("residua-analyze")
ABLATION = Path("residua-ablate")
RECONSTRUCTIONS = Path("residua-reconstructions")

Captures = Annotated[Path, typer.Argument(help="Folder that `residua capture` wrote.")]
Density = Annotated[float, typer.Option(help="Share of the pairs that may be evaluated.")]
Groups = Annotated[int | None, typer.Option(min=1, help="Default: by the tokens.")]
BackendName = Annotated[str, typer.Option(help="Backend name, or auto.")]
Quick = Annotated[bool, typer.Option("--quick", help="Four calls and fewer settings.")]
Out = Annotated[Path, typer.Option(help="Folder for the report.")]
Force = Annotated[bool, typer.Option("--force", help="Replace results in a folder that exists.")]


@app.command(epilog="Example:  residua analyze captures --out residua-analyze")
def analyze(
    context: typer.Context,
    captures: Captures,
    density: Density = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    quick: Quick = False,
    out: Out = ANALYSIS,
    force: Force = False,
) -> None:
    """Measure support, kept mass against error, and affine residuals (the paper's section 3)."""
    with readable_errors():
        groups = {"query_groups": query_groups, "kv_groups": kv_groups}
        config = Config.paper(density=density, backend=backend, **groups)
        run_study("analyze", context, captures, config, quick, out, force)


@app.command(epilog="Example:  residua ablate captures --out residua-ablate")
def ablate(
    context: typer.Context,
    captures: Captures,
    density: Density = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    quick: Quick = False,
    out: Out = ABLATION,
    force: Force = False,
) -> None:
    """Measure partition, reconstruction, density, probes and k-means steps (the paper's Tables 2-4)."""
    with readable_errors():
        groups = {"query_groups": query_groups, "kv_groups": kv_groups}
        config = Config.paper(density=density, backend=backend, **groups)
        run_study("ablate", context, captures, config, quick, out, force)


def run_study(
    name: str, context: typer.Context, captures: Path, config: Config, quick: bool, out: Path, force: bool
) -> None:
    """Reads a capture, studies it and publishes the report."""
    # imported here: the other commands must not wait for it
    from ..generation.files import check_folder
    from ..lab.ablating import ablate as ablation
    from ..lab.analysis import analyze as analysis
    from ..lab.captures import read_captures
    from ..lab.comparing_repairs import compare_reconstructions
    from .lab_progress import call_bar, publish

    study = {"analyze": analysis, "ablate": ablation, "reconstructions": compare_reconstructions}[name]
    check_folder(out, force, reuse=out in (ANALYSIS, ABLATION, RECONSTRUCTIONS))
    calls = read_captures(captures)
    with call_bar() as watch:
        report = study(calls, config, f"{command_line(context)} {captures.name}", quick, watch)
    publish(report, out)

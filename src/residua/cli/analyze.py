"""`residua analyze`: the structure of captured attention, as in section 3 of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import Config
from .app import app, readable_errors
from .options import command_line

FOLDER = Path("residua-analyze")


@app.command(epilog="Example:  residua analyze captures --out residua-analyze")
def analyze(
    context: typer.Context,
    captures: Annotated[Path, typer.Argument(help="Folder that `residua capture` wrote.")],
    density: Annotated[float, typer.Option(help="Share of the pairs that may be evaluated.")] = 0.22,
    query_groups: Annotated[int | None, typer.Option(min=1, help="Default: by the tokens.")] = None,
    kv_groups: Annotated[int | None, typer.Option(min=1, help="Default: by the tokens.")] = None,
    backend: Annotated[str, typer.Option(help="Backend name, or auto.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Four calls and fewer settings.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = FOLDER,
    force: Annotated[bool, typer.Option("--force", help="Replace results in a folder that exists.")] = False,
) -> None:
    """Measure support, kept mass against error, and affine residuals (the paper's section 3)."""
    with readable_errors():
        # imported here: the other commands must not wait for it
        from ..generation.files import check_folder
        from ..lab.analysis import analyze as study
        from ..lab.captures import read_captures
        from .lab_progress import call_bar, publish

        check_folder(out, force, reuse=out == FOLDER)
        calls = read_captures(captures)
        config = Config(density=density, query_groups=query_groups, kv_groups=kv_groups, backend=backend)
        command = f"{command_line(context)} {captures.name}"
        with call_bar() as watch:
            report = study(calls, config, command, quick, watch)
        publish(report, out)

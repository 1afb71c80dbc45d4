"""`residua evaluate`: many prompts, seeds and settings, on this machine or on a Ray cluster."""

from pathlib import Path
from typing import Annotated

import typer

from .app import command, console

INCOMPLETE = 3  # exit code: rows failed or are missing


@command(epilog="Example:  residua evaluate examples/suite.toml --out runs/first")
def evaluate(
    suite: Annotated[Path, typer.Argument(help="TOML file: model, prompts, seeds, settings.")],
    out: Annotated[Path, typer.Option(help="Folder for rows, videos and report; an existing one is continued.")],
    ray: Annotated[
        str | None,
        typer.Option(help="auto, or the address of a Ray cluster; off: no Ray. Default: Ray on this machine."),
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Allow a suite with more prompts, seeds or settings than the folder has.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed rows again.")] = False,
) -> None:
    """Generate every prompt with every seed and setting, measure against dense, write the tables."""
    # Imported here, so that other commands do not wait for it.
    from ..evaluate import require_packages

    require_packages()
    from ..evaluate import run
    from ..evaluate.suite import read_suite
    from .evaluate_progress import live_table

    wanted = read_suite(suite)
    # The command is part of the report, so it must not contain paths of this machine.
    repeat = f"residua evaluate {suite.name} --out {out.name}"
    options = run.Options(ray, extend, retry_failed, repeat)
    with live_table(wanted) as watcher:
        found = run.evaluate(wanted, out, options, watcher)
    console.print(
        f"{found.done} of {found.rows} rows done, {found.failed} failed; open {found.report} in a browser",
        soft_wrap=True,
        markup=False,
    )
    if found.missing:
        console.print(
            f"{found.missing} rows are missing because their workers died; run the same command again", soft_wrap=True
        )
    if found.failed or found.missing:
        raise typer.Exit(INCOMPLETE)

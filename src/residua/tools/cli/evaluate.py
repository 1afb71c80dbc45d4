"""`residua evaluate`: many prompts, seeds and settings, on this machine or on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from .app import command, console, readable_errors

INCOMPLETE = 3  # exit code: rows failed or are missing


@command(epilog="Example:  residua evaluate examples/suite.toml --out runs/first")
def evaluate(
    context: typer.Context,
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
    with readable_errors():
        _evaluate(SimpleNamespace(**context.params))


def _evaluate(given: SimpleNamespace) -> None:
    # Imported here, so that other commands do not wait for it.
    from ..evaluate import require_packages

    require_packages()
    from ..evaluate.run import Options, evaluate
    from ..evaluate.suite import read_suite
    from .evaluate_progress import live_table

    suite = read_suite(given.suite)
    # The command is part of the report, so it must not contain paths of this machine.
    repeat = f"residua evaluate {given.suite.name} --out {given.out.name}"
    options = Options(given.ray, given.extend, given.retry_failed, repeat)
    with live_table(suite) as watcher:
        found = evaluate(suite, given.out, options, watcher)
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

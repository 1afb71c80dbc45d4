"""Progress bars for generations: one line per run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..generate.compare import Watch
from ..generate.run import Progress as Steps
from .app import console


@contextmanager
def step_bars(quiet: bool = False) -> Iterator[Watch]:
    """A function that opens a named bar; `quiet` for all processes except the first."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet) as bars:

        def watch(name: str) -> Steps:
            line = bars.add_task(name, total=None)

            def step(done: int, total: int) -> None:
                bars.update(line, completed=done, total=total)

            return step

        yield watch

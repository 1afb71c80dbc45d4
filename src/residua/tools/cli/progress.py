"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .app import console

if TYPE_CHECKING:
    from ..generate.compare import Watch


@contextmanager
def step_bars(quiet: bool = False) -> Iterator[Watch]:
    """A function that opens a named bar over the steps of a generation; `quiet` for all processes except the first."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(30), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet) as bars:

        def watch(name: str) -> Callable[[int, int], None]:
            line = bars.add_task(name, total=None)
            return lambda done, total: bars.update(line, completed=done, total=total)

        yield watch


@contextmanager
def call_bar() -> Iterator[Callable[[int, int, str], None]]:
    """One bar over calls: how many are done, of how many, and what comes next."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        line = bars.add_task("", total=None)
        yield lambda done, total, what: bars.update(line, completed=done, total=total, description=escape(what[:40]))


@contextmanager
def counter(what: str) -> Iterator[Callable[[int], None]]:
    """A counter for a number whose end is unknown."""
    columns = (SpinnerColumn(), TextColumn("{task.completed} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        line = bars.add_task(what, total=None)
        yield lambda done: bars.update(line, completed=done)

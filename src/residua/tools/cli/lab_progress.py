"""What the commands of the lab share: progress bars, and publishing a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .app import console, show

if TYPE_CHECKING:
    from ..reports.page import Page


@contextmanager
def call_bar() -> Iterator[Callable[[int, int, str], None]]:
    """One bar over the calls of a capture."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        line = bars.add_task("", total=None)

        def watch(done: int, total: int, what: str) -> None:
            bars.update(line, completed=done, total=total, description=escape(what[:40]))

        yield watch


@contextmanager
def counter(what: str) -> Iterator[Callable[[int], None]]:
    """A counter for a number whose end is unknown."""
    columns = (SpinnerColumn(), TextColumn("{task.completed} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        line = bars.add_task(what, total=None)
        yield lambda done: bars.update(line, completed=done)


def publish(report: Page, out: Path) -> None:
    """Prints tables and findings, and writes everything to the folder."""
    from ...util.files import publish_folder

    publish_folder(out, report.files())
    for table in report.tables:
        show(table.rich())
        console.print()
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")
    for item in report.findings:
        colour = {"confirmed": "green", "contradicted": "red"}.get(item.verdict, "yellow")
        console.print(f"[{colour}]{item.verdict}[/{colour}]  {escape(item.claim)}: {escape(item.evidence)}")
    console.print(f"wrote {out}/ : open {out / 'report.html'} in a browser", soft_wrap=True, markup=False)

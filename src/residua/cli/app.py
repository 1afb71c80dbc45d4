"""The application object that every command attaches itself to, and what all commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import InputError, ResiduaError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Training-free sparse attention for video diffusion transformers (SparsePR).",
)
console = Console()
complaints = Console(stderr=True)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turns errors meant for people into one line and a non-zero exit."""
    try:
        yield
    except ResiduaError as error:
        complaints.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        complaints.print("[yellow]stopped[/yellow]")
        raise typer.Exit(130) from None


def writable(path: Path, force: bool) -> Path:
    """Refuses to overwrite a file, or to write through a link, unless told to."""
    if path.is_symlink():
        raise InputError(f"{path} is a link: give the file itself")
    if path.exists() and not force:
        raise InputError(f"{path} exists: choose another name, or add --force to replace it")
    return path


def figures(title: str, *columns: str) -> Table:
    """A table of numbers that fits a terminal of 80 columns: a name on the left, figures to the right."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    return table

"""`residua rivals`: other training-free methods on recorded calls, at the same density."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from ..errors import InputError
from .app import app, readable_errors
from .lab_progress import call_bar, publish
from .options import command_line, words

QUICK_CALLS = 4


@app.command(
    epilog="Example:  residua rivals captures/ --density 0.22 --methods svg2,svg-ear,sparsepr --quick"
)
def rivals(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Captured calls: safetensors, with or without a manifest.")],
    density: Annotated[float, typer.Option(help="Share of the pairs that may be evaluated.")] = 0.22,
    methods: Annotated[str | None, typer.Option(help="Comma separated; default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method; the median counts.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: PyTorch's.")] = None,
    backend: Annotated[str, typer.Option(help="Attention backend for all methods, or auto.")] = "auto",
    groups: Annotated[str | None, typer.Option(help="Query and K/V groups of all methods: 64,128.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"At most {QUICK_CALLS} calls.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("residua-rivals"),
    force: Annotated[bool, typer.Option("--force", help="Replace results in a folder that exists.")] = False,
) -> None:
    """Compare training-free sparse attention at matched density: error, pairs, products and time."""
    with readable_errors():
        _rivals(context, SimpleNamespace(**context.params))


def _rivals(context: typer.Context, given: SimpleNamespace) -> None:
    # Imported here: the other commands must not wait for what the lab needs.
    import torch

    from ..config import Config
    from ..generation.files import check_folder
    from ..lab.captures import read_captures
    from ..lab.rivals import find
    from ..lab.rivals.report import make_report
    from ..lab.rivals.study import Settings, study

    check_folder(given.out, given.force)
    chosen = find(None if given.methods is None else words("methods", given.methods))
    settings = Settings(
        Config(density=given.density).density, given.repeats, given.backend, _groups(given.groups)
    )
    calls = read_captures(given.folder)
    if given.quick:
        calls = calls[:: -(-len(calls) // QUICK_CALLS)]
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    with call_bar() as watch:
        found, refused = study(calls, chosen, settings, watch)
    command = f"{command_line(context)} {given.folder.name}"
    publish(make_report(found, refused, settings, command), given.out)


def _groups(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = words("groups", text)
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--groups {text!r}: wanted two whole numbers, such as 64,128")
    return int(parts[0]), int(parts[1])

"""`residua reconstructions`: what stands for the skipped pairs, at equal cost, on captured calls."""

from __future__ import annotations

from typing import Annotated

import typer

from ..config import Config
from .app import app, readable_errors
from .studies import RECONSTRUCTIONS, BackendName, Captures, Force, Groups, Out, Quick, run_study


@app.command(epilog="Example:  residua reconstructions captures --out residua-reconstructions")
def reconstructions(
    context: typer.Context,
    captures: Captures,
    density: Annotated[float, typer.Option(help="What the ingredients of anchored may cost.")] = 0.22,
    query_groups: Groups = None,
    kv_groups: Groups = None,
    backend: BackendName = "auto",
    quick: Quick = False,
    out: Out = RECONSTRUCTIONS,
    force: Force = False,
) -> None:
    """Compare the reconstructions at equal cost, take anchored apart, check what calls say of their error."""
    with readable_errors():
        config = Config(density=density, query_groups=query_groups, kv_groups=kv_groups, backend=backend)
        run_study("reconstructions", context, captures, config, quick, out, force)

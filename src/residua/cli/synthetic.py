"""`residua bench synthetic`: the operator on calls that look like those of a video model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bench.synthetic import demo_rows
from ..config import Config
from ..synthetic import CONCENTRATIONS
from .app import console, figures, readable_errors
from .bench import ReconstructionName, bench


@bench.command(epilog="Example:  residua bench synthetic --tokens 16384 --density 0.12")
def synthetic(
    tokens: Annotated[int, typer.Option(min=64, help="Video tokens of a call.")] = 8192,
    heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=8)] = 128,
    density: Annotated[
        float, typer.Option(help="Share of the query-key pairs that may be evaluated.")
    ] = 0.22,
    reconstruction: ReconstructionName = "anchored",
    backend: Annotated[str, typer.Option(help="Backend name, or auto.")] = "auto",
) -> None:
    """Run the operator on video-like synthetic calls and compare it with dense attention."""
    table = figures(
        f"{reconstruction} against dense attention: {heads} heads x {head_dim}, density {density:g}",
        "head", "keys of\n95% mass", "dense\nms", "sparse\nms", "cold\nms", "speed\n-up", "density",
        "error\nmean", "error\np99", "mean, hard\ndrop",
    )  # fmt: skip
    with readable_errors():
        rows = demo_rows(
            tokens, heads, head_dim, Config(density=density, reconstruction=reconstruction, backend=backend)
        )
        with console.status("measuring ...") as status:
            for name in CONCENTRATIONS:
                status.update(f"measuring a {name} head ...")
                row = next(rows)
                table.add_row(
                    row.concentration, f"{row.key_fraction:.1%}", f"{1e3 * row.dense_seconds:.0f}",
                    f"{1e3 * row.warm_seconds:.0f}", f"{1e3 * row.cold_seconds:.0f}", f"{row.speedup:.2f}",
                    f"{row.density:.1%}", f"{row.mean_error:.3f}", f"{row.p99_error:.3f}",
                    f"{row.hard_drop_error:.3f}",
                )  # fmt: skip
    console.print(table)
    console.print(
        f"{row.tokens} tokens, backend {row.backend}. Errors are relative to dense attention, per row: the "
        f"output is an approximation. The speed-up can be {1 / density:.2f}x at most."
    )

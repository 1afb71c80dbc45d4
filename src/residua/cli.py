"""The command line: parse, call, print."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .errors import ResiduaError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Training-free sparse attention for video diffusion transformers (SparsePR).",
)
console = Console()


@app.callback()
def _main() -> None:
    """Keeps `residua doctor` a subcommand even while there are few."""


@app.command(epilog="Example:  residua doctor --json")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions, CPU features, and which backends can run here, with the reason for each that cannot."""
    from . import doctor as doctoring

    facts = doctoring.report()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table("package", "version", title="Versions")
    for name, version in facts["versions"].items():
        table.add_row(name, version or "[dim]not installed[/dim]")
    console.print(table)
    cpu = facts["cpu"]
    console.print(
        f"CPU: {cpu['model']}, {cpu['threads']} threads, {' '.join(cpu['features']) or 'no SIMD flags seen'}"
    )
    console.print(f"GPU: {', '.join(facts['gpus']) or 'none visible to torch'}")
    table = Table("backend", "state", "what it is", title="Backends, best first")
    for state in facts["backends"]:
        mark = (
            "[green]available[/green]"
            if state["reason"] is None
            else f"[yellow]no:[/yellow] {state['reason']}"
        )
        table.add_row(state["name"], mark, state["summary"])
    console.print(table)


@app.command(epilog="Example:  residua demo --tokens 8192 --density 0.22")
def demo(
    tokens: Annotated[int, typer.Option(min=64, help="Video tokens of a call.")] = 8192,
    heads: Annotated[int, typer.Option(min=1)] = 2,
    head_dim: Annotated[int, typer.Option(min=8)] = 128,
    density: Annotated[
        float, typer.Option(help="Share of the query-key pairs that may be evaluated.")
    ] = 0.22,
    backend: Annotated[str, typer.Option(help="Backend name, or auto.")] = "auto",
) -> None:
    """Run the operator on video-like synthetic calls and compare it with dense attention."""
    from .config import Config
    from .demo import demo_rows
    from .synthetic import CONCENTRATIONS

    table = Table(
        "head", "keys for\n95 % mass", "dense\nms", "sparse\nms", "(cold)\nms", "speed-\nup", "density",
        "error\nmean", "error\np99", "no repair\nmean",
        title=f"SparsePR against dense attention: {heads} heads x {head_dim}, density {density:g}",
    )  # fmt: skip
    try:
        config = Config(density=density, backend=backend)
        rows = demo_rows(tokens, heads, head_dim, config)
        with console.status("measuring ...") as status:
            for name in CONCENTRATIONS:
                status.update(f"measuring a {name} head ...")
                row = next(rows)
                table.add_row(
                    row.concentration, f"{row.key_fraction:.1%}", f"{1e3 * row.dense_seconds:.0f}",
                    f"{1e3 * row.warm_seconds:.0f}", f"{1e3 * row.cold_seconds:.0f}", f"{row.speedup:.2f}x",
                    f"{row.density:.2%}", f"{row.mean_error:.4f}", f"{row.p99_error:.4f}",
                    f"{row.hard_drop_error:.4f}",
                )  # fmt: skip
    except ResiduaError as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(2) from None
    console.print(table)
    console.print(
        f"{row.tokens} tokens, backend {row.backend}. Errors are relative to dense attention, per row: "
        f"the output is an approximation. The speed-up can be {1 / density:.2f}x at most."
    )

"""`residua doctor`: what this machine has and which backends it can run."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from .. import doctor as doctoring
from .app import app, console


@app.command(epilog="Example:  residua doctor --json")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions, CPU features, and which backends can run here, with the reason for each that cannot."""
    facts = doctoring.report()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table("package", "version", title="Versions")
    for name, version in facts["versions"].items():
        table.add_row(name, version or "[dim]not installed[/dim]")
    console.print(table)
    cpu = facts["cpu"]
    features = " ".join(cpu["features"]) or "no known SIMD features"
    console.print(f"CPU: {cpu['model']}, {cpu['threads']} threads, {features}")
    console.print(f"GPU: {', '.join(facts['gpus']) or 'none visible to torch'}")
    table = Table("backend", "state", "what it is", title="Backends, best first")
    for state in facts["backends"]:
        missing = state["reason"]
        mark = "[green]available[/green]" if missing is None else f"[yellow]no:[/yellow] {missing}"
        table.add_row(state["name"], mark, state["summary"])
    console.print(table)

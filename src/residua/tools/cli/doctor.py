"""`residua doctor`: what this machine has and which backends it can run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ...util import json_text
from .app import command, console


@command(epilog="Examples:  residua doctor --json;  residua doctor --self-test")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Run every kernel of every GPU backend against plain torch.")
    ] = False,
) -> None:
    """Show versions, CPU features, and which backends can run here, with the reason for each that cannot."""
    if self_test:
        _self_test(as_json)
    else:
        _report(as_json)


def _report(as_json: bool) -> None:
    from .. import doctor as doctoring

    facts = doctoring.report()
    if as_json:
        typer.echo(json_text.dumps(facts, indent=2))
    else:
        _print_report(facts)


def _self_test(as_json: bool) -> None:
    from .. import doctor as doctoring

    with console.status("testing the GPU kernels ..."):
        rows = doctoring.self_test()
    if as_json:
        typer.echo(json_text.dumps(rows, indent=2))
    else:
        for row in rows:
            table = Table("kernel", "dtype", "shape", "error", "allowed", "verdict", title=row["backend"])
            for check in row["checks"]:
                said = "[green]passed[/green]" if check["passed"] else f"[red]FAILED[/red] {escape(check['problem'])}"
                figures = (f"{check['error']:.2g}", f"{check['limit']:.2g}")
                table.add_row(check["kernel"], check["dtype"], check["shape"], *figures, said)
            console.print(table)
            console.print(row["verdict"], markup=False)
    if any(row["reason"] for row in rows):
        raise typer.Exit(1)


def _print_report(facts: dict[str, Any]) -> None:
    table = Table("package", "version", title="Versions")
    for name, version in facts["versions"].items():
        table.add_row(name, version or "[dim]not installed[/dim]")
    console.print(table)
    cpu = facts["cpu"]
    features = " ".join(cpu["features"]) or "no known SIMD features"
    console.print(f"CPU: {cpu['model']}, {cpu['threads']} threads, {features}")
    console.print(f"native kernels: {cpu['native_isa'] or 'not built'}")
    console.print(f"GPU: {', '.join(facts['gpus']) or 'none visible to torch'}")
    table = Table("backend", "state", "what it is", title="Backends, best first")
    for state in facts["backends"]:
        missing = state["reason"]
        mark = "[green]available[/green]" if missing is None else f"[yellow]no:[/yellow] {escape(missing)}"
        table.add_row(state["name"], mark, escape(state["summary"]))
    console.print(table)

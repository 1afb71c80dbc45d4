"""`residua doctor`: what this machine has and which backends it can run."""

from typing import Annotated, Any

import typer

from ...util import json_text
from ..reports.table import Table
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
            columns = ("kernel", "dtype", "shape", "error", "allowed", "verdict")
            checks = tuple(_check_cells(check) for check in row["checks"])
            console.print(Table(row["backend"], columns, checks).rich(colours={"passed": "green", "FAILED": "red"}))
            console.print(row["verdict"], markup=False)
    if any(row["reason"] for row in rows):
        raise typer.Exit(1)


def _check_cells(check: dict[str, Any]) -> tuple[str, ...]:
    said = "passed" if check["passed"] else f"FAILED {check['problem']}"
    return check["kernel"], check["dtype"], check["shape"], f"{check['error']:.2g}", f"{check['limit']:.2g}", said


def _print_report(facts: dict[str, Any]) -> None:
    versions = tuple((name, version or "not installed") for name, version in facts["versions"].items())
    console.print(Table("Versions", ("package", "version"), versions).rich(colours={"not installed": "dim"}))
    cpu = facts["cpu"]
    features = " ".join(cpu["features"]) or "no known SIMD features"
    console.print(f"CPU: {cpu['model']}, {cpu['threads']} threads, {features}")
    console.print(f"native kernels: {cpu['native_isa'] or 'not built'}")
    console.print(f"GPU: {', '.join(facts['gpus']) or 'none visible to torch'}")
    states = tuple(
        (state["name"], "available" if state["reason"] is None else f"no: {state['reason']}", state["summary"])
        for state in facts["backends"]
    )
    table = Table("Backends, best first", ("backend", "state", "what it is"), states)
    console.print(table.rich(colours={"available": "green", "no:": "yellow"}))

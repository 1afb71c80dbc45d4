"""The command line as a user sees it, in this process: what it prints and how it ends."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from residua.cli import app


def run(*arguments: object, columns: int = 200) -> Any:
    """The result of `residua <arguments>`, without colours, on a terminal of so many columns."""
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(app, [str(part) for part in arguments], env=environment)

"""The command line as a user sees it, in this process: what it prints and how it ends."""

import os
from typing import Any
from unittest.mock import patch

from typer import Typer
from typer.testing import CliRunner

from residua.tools.cli import app


def run(*arguments: object, columns: int = 200, of: Typer = app) -> Any:
    """The result of `residua <arguments>`, without colours, on a terminal of so many columns; `of` is the application
    of another program."""
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    with patch.dict(os.environ):  # commands quieten other packages, for as long as they last
        return CliRunner().invoke(of, [str(part) for part in arguments], env=environment)

"""The command line: what it prints, exit codes, and errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from residua.cli import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_help_names_the_commands():
    found = run("--help")
    assert found.exit_code == 0 and "doctor" in found.output and "demo" in found.output


def test_doctor_as_tables_and_json():
    found = run("doctor")
    assert found.exit_code == 0
    for word in ("Versions", "torch", "CPU:", "GPU:", "portable", "available"):
        assert word in found.output
    report = json.loads(run("doctor", "--json").output)
    assert {"portable", "reference"} <= {state["name"] for state in report["backends"]}


def test_bench_synthetic_prints_one_row_per_concentration():
    found = run(
        "bench", "synthetic", "--tokens", "512", "--heads", "1", "--head-dim", "32", "--backend", "portable"
    )
    assert found.exit_code == 0, found.output
    for word in ("broad", "medium", "sparse", "density", "error", "backend portable", "approximation"):
        assert word in found.output


@pytest.mark.parametrize(
    "arguments, message",
    [(("--density", "0"), "Config.density"), (("--density", "nan"), "Config.density"),
     (("--backend", "quantum"), "backend='quantum' is not known")],
)  # fmt: skip
def test_bad_settings_end_with_a_message_and_not_a_traceback(arguments, message):
    found = run("bench", "synthetic", "--tokens", "128", *arguments)
    assert found.exit_code == 2
    assert message in found.output and "Traceback" not in found.output


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("bench", "synthetic", "--tokens", "1"), ("bench", "synthetic", "--tokens", "many"),
     ("bench", "nonsense"), ("demo", "--unknown")],
)  # fmt: skip
def test_bad_arguments_exit_with_two(arguments):
    assert run(*arguments).exit_code == 2


def test_python_dash_m():
    found = subprocess.run(
        [sys.executable, "-m", "residua", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0 and "versions" in json.loads(found.stdout)

"""The command line: what it prints, exit codes, and errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")
import torch
import typer
from command import run

import residua
from residua.cli import options
from residua.cli.app import readable_errors
from residua.reconstruction import RECONSTRUCTIONS
from residua.synthetic import CONCENTRATIONS


def test_help_names_the_commands():
    found = run("--help")
    assert found.exit_code == 0
    assert found.output.index(" doctor ") < found.output.index(" demo ") < found.output.index(" capture ")


def test_help_needs_no_torch_and_shows_types_in_words():
    code = "import sys, residua.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    found = run("demo", "--help").output
    assert "INTEGER" in found and "NUMBER" in found and "PATH" in found
    for name in ("demo", "plan", "evaluate", "rivals"):
        found = run(name, "--help").output
        assert not any(kind in found for kind in ("<bool>", "<int", "<str>", "<path>")), name


def test_names_that_help_writes_out_are_those_that_exist():
    assert set(options.RECONSTRUCTIONS) == set(RECONSTRUCTIONS)
    assert tuple(CONCENTRATIONS) == options.CONCENTRATIONS


@pytest.mark.parametrize(
    "arguments, new",
    [
        (("repairs", "captures"), "reconstructions"),
        (("demo", "--repair", "none"), "--reconstruction"),
        (("bench", "attention", "--repair=none"), "--reconstruction"),
        (("compare", "--repairs", "none"), "--reconstructions"),
        (("generate", "--profile"), "--time-stages"),
    ],
)
def test_old_names_are_refused_with_the_new_one(arguments, new):
    found = run(*arguments)
    assert found.exit_code == 2 and f"is now called {new}" in found.output


@pytest.mark.parametrize(
    "given, wanted",
    [
        (("--page", "kernels.md"), "only with --compile-kernels"),
        (("--compile-kernels", "--json"), "give --page FILE"),
    ],
)
def test_doctor_refuses_options_that_would_do_nothing(given, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run("doctor", *given)
    assert found.exit_code == 2 and wanted in " ".join(found.output.split())
    assert not list(tmp_path.iterdir())


def test_version():
    found = run("--version")
    assert found.exit_code == 0 and found.output == f"residua {residua.__version__}\n"


@pytest.mark.parametrize(
    "error, says, status",
    [
        (PermissionError(13, "Permission denied", "out.json"), "out.json: Permission denied", 2),
        (ValueError("height has to be divisible\nby 16"), "ValueError: height has to be divisible (RES", 1),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory (CUDA out of memory): a smaller", 2),
        (KeyboardInterrupt(), "stopped", 130),
    ],
)
def test_no_error_of_others_ends_in_a_traceback(error, says, status, capsys):
    with pytest.raises(typer.Exit) as ended, readable_errors():
        raise error
    printed = capsys.readouterr().err
    assert ended.value.exit_code == status and says in printed and printed.count("\n") == 1


def test_a_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("RESIDUA_TRACEBACK", "1")
    with pytest.raises(ValueError, match="where"), readable_errors():
        raise ValueError("where")


def test_doctor_as_tables_and_json():
    found = run("doctor")
    assert found.exit_code == 0
    for word in ("Versions", "torch", "CPU:", "GPU:", "portable", "available"):
        assert word in found.output
    report = json.loads(run("doctor", "--json").output)
    assert {"portable", "reference"} <= {state["name"] for state in report["backends"]}


@pytest.mark.slow
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

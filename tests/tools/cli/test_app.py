"""The command line: what it prints, exit codes, and errors without tracebacks."""

import io
import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")
import torch
import typer
from rich.console import Console

import residua
from residua.method.reconstructions import RECONSTRUCTIONS
from residua.tools.cli.app import readable_errors, show
from residua.tools.reports.table import Table
from tests.support.command import run


def test_help_names_the_commands():
    found = run("--help")
    assert found.exit_code == 0
    assert found.output.index(" doctor ") < found.output.index(" demo ") < found.output.index(" capture ")


def test_help_needs_no_torch_and_shows_types_in_words():
    code = "import sys, residua.tools.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    found = run("demo", "--help").output
    assert "INTEGER" in found and "NUMBER" in found and "PATH" in found
    for name in ("demo", "plan", "evaluate", "baselines"):
        found = run(name, "--help").output
        assert not any(kind in found for kind in ("<bool>", "<int", "<str>", "<path>")), name


def test_options_that_name_a_reconstruction_list_them_if_it_is_wrong():
    found = run("bench", "attention", "--tokens", "64", "--reconstruction", "magic")
    assert found.exit_code == 2 and all(name in found.output for name in RECONSTRUCTIONS)


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


def test_names_in_a_message_cannot_steer_the_terminal(capsys):
    with pytest.raises(typer.Exit), readable_errors():
        raise residua.InputError("model = '\x1b]0;title\x07 \x9b2J \u202e [red]ärger'")
    printed = capsys.readouterr().err
    assert r"\x1b]0;title\x07 \x9b2J \u202e [red]ärger" in printed and printed[:-1].isprintable()


def test_numbers_are_whole_in_a_narrow_terminal(monkeypatch):
    screen = Console(file=io.StringIO(), width=40)
    monkeypatch.setattr(sys.modules["residua.tools.cli.app"], "console", screen)  # `cli.app` is the Typer
    columns = ("part", *(f"column {n}" for n in range(4)))
    show(Table("costs", columns, (("attention", *(f"{n}23,456.789 s" for n in range(4))),)).rich())
    printed = screen.file.getvalue()
    assert all(f"{n}23,456.789 s" in printed for n in range(4)) and "…" not in printed


def test_a_closed_pipe_does_not_lose_the_figures(tmp_path, monkeypatch):
    def closed(table):
        raise SystemExit(1)  # as rich does

    monkeypatch.setattr("residua.tools.cli.plan.show", closed)
    assert run("plan", "wan2.2", "--json", tmp_path / "plan.json").exit_code == 1
    assert json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize("arguments", [("plan", "wan2.2", "--json", "-"), ("doctor", "--json")])
def test_json_on_standard_output_is_nothing_but_json(arguments):
    found = run(*arguments)
    assert found.exit_code == 0 and json.loads(found.stdout, parse_constant=pytest.fail)


def test_a_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("RESIDUA_TRACEBACK", "1")
    with pytest.raises(ValueError, match="where"), readable_errors():
        raise ValueError("where")


def test_doctor_as_tables_and_json():
    found = run("doctor")
    assert found.exit_code == 0
    for word in ("Versions", "torch", "CPU:", "GPU:", "torch", "available"):
        assert word in found.output
    report = json.loads(run("doctor", "--json").output)
    assert {"torch", "reference"} <= {state["name"] for state in report["backends"]}


@pytest.mark.slow
def test_bench_synthetic_prints_one_row_per_concentration():
    found = run("bench", "synthetic", "--tokens", "512", "--heads", "1", "--head-dim", "32", "--backend", "torch")
    assert found.exit_code == 0, found.output
    for word in ("broad", "medium", "sparse", "density", "error", "backend torch", "approximation"):
        assert word in found.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--density", "0"), "Config.density"),
        (("--density", "nan"), "Config.density"),
        (("--backend", "quantum"), "backend='quantum' is not known"),
    ],
)
def test_bad_settings_end_with_a_message_and_not_a_traceback(arguments, message):
    found = run("bench", "synthetic", "--tokens", "128", *arguments)
    assert found.exit_code == 2
    assert message in found.output and "Traceback" not in found.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("bench", "synthetic", "--tokens", "1"),
        ("bench", "synthetic", "--tokens", "many"),
        ("bench", "nonsense"),
        ("demo", "--unknown"),
    ],
)
def test_bad_arguments_exit_with_two(arguments):
    assert run(*arguments).exit_code == 2


def test_python_dash_m():
    found = subprocess.run(
        [sys.executable, "-m", "residua", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0 and "versions" in json.loads(found.stdout)

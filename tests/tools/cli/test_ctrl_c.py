"""Ctrl-C at every stage of every command that computes: one line, exit code 130, nothing half written, and
the same command works afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("diffusers")
pytest.importorskip("av")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")
pytest.importorskip("ray")
import torch

from dev.gpu_model import model
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.capture import writer as writing
from tests.support import kept_code as kept
from tests.support.ctrl_c import (
    COMMANDS,
    arguments,
    check_folder_is_whole,
    finish,
    interrupt,
    places_of,
    prepare,
    spread,
)

pytestmark = pytest.mark.slow

PLACES = 6
PATIENCE = 900  # seconds; only a test that hangs gets there
NEEDS = {"dev.gpu_model": "triton"}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def kept_code(tmp_path, monkeypatch):
    """Every run of a test compiles the same kernels."""
    (tmp_path / "code").mkdir()
    monkeypatch.setenv(kept.FOLDER, str(tmp_path / "code"))
    monkeypatch.setattr(model, "_compile", kept.compile_once)


@pytest.mark.parametrize("name", COMMANDS)
def test_at_every_stage(name, files, kept_code, tmp_path):
    pytest.importorskip(NEEDS.get(name, "torch"))
    for number, place in enumerate(spread(places_of(name, files, tmp_path), PLACES)):
        (tmp_path / str(number)).mkdir()
        os.chdir(tmp_path / str(number))
        interrupt(name, files, place)
    finish(name, files)  # in the folder of the last one


def test_after_the_first_recorded_call_and_before_its_entry(monkeypatch):
    q, k, v = torch.randn(3, 64, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    real, written = writing._write_manifest, []

    def second_time(folder, manifest):
        if written:
            raise KeyboardInterrupt
        written.append(manifest)
        real(folder, manifest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing, "_write_manifest", second_time)
        CaptureWriter("out", "tiny").add(q, k, v, layer=0, head=0)
    again = CaptureWriter("out", "tiny", run={"seed": 1})  # nothing was finished: another run may begin
    assert again.add(q, k, v, layer=0, head=0) and len(read_captures("out")) == 1
    writing.clear_capture(Path("out"))
    assert not list(Path("out").iterdir())


def wait_for(condition, process: subprocess.Popen) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def hear_interrupts() -> None:
    """A shell starts what runs in the background with interrupts ignored, and the tests may run there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stopped(arguments: list[str], condition, program: str = "residua") -> str:
    """What a command printed that got a real Ctrl-C, as a terminal sends it: to all of its processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    try:
        wait_for(condition, process)
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, printed
    assert "Traceback" not in printed and printed.splitlines()[-1] == "stopped", printed
    check_folder_is_whole(Path())
    return printed


def test_a_real_one_in_a_run_keeps_what_was_recorded(files):
    given = arguments("capture", files)
    longer = [*given, "--run-steps", "3000", "--steps", ",".join(map(str, range(0, 3000, 2)))]
    stopped(longer, lambda: len(list(Path("out").glob("*.safetensors"))) >= 3)
    kept = json.loads(Path("out/manifest.json").read_text())["calls"]
    assert len(kept) >= 2


def test_a_real_one_in_a_benchmark_keeps_its_rows(files):
    tokens = ",".join(["64"] * 200)
    given = ["bench", "sweep", "--tokens", tokens, "--densities", "0.5", "--heads", "1", "--head-dim", "16"]
    stopped([*given, "--out", "out"], lambda: Path("out/sweep.json").exists())
    assert json.loads(Path("out/sweep.json").read_text())


@pytest.mark.parametrize("address", ["off", "local"])
def test_a_real_one_in_an_evaluation_goes_on_later(address, files):
    text = Path(files["SUITE"]).read_text().replace("steps = 2", "steps = 40")
    Path("suite.toml").write_text(text)
    given = ["evaluate", "suite.toml", "--out", "out", *(["--ray", "off"] if address == "off" else [])]
    rows = Path("out/rows")
    stopped(given, lambda: rows.is_dir() and list(rows.glob("*.parquet")))
    assert not list(Path("out/running").iterdir())
    kept = {path: path.read_bytes() for path in rows.glob("*.parquet")}
    again = subprocess.run([sys.executable, "-m", "residua", *given[:4], "--ray", "off"], check=False)
    assert again.returncode == 0 and len(list(rows.glob("*.parquet"))) == 3
    assert kept and all(path.read_bytes() == content for path, content in kept.items())


def test_a_real_one_ends_the_processes_that_compile():
    pytest.importorskip("triton")

    def compiling() -> bool:
        return bool(children())

    stopped([], compiling, "dev.gate")
    assert not children()


def children() -> list[str]:
    """Processes that were started to compile, as they stand in /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
            here = os.readlink(path.with_name("cwd")) == os.getcwd()
        except OSError:
            continue
        if here and "spawn_main" in text:
            found.append(text)
    return found


def test_before_the_command_begins(monkeypatch, capsys):
    from residua import __main__ as entry

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "_run", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            entry.main()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # nothing is left to interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130 and capsys.readouterr().err == "stopped\n"

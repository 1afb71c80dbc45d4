"""Commands on a disk that is full, or where nothing may be written: one line, an exit code, nothing half
written, finished work kept."""

import dataclasses
import os
import resource
from contextlib import contextmanager

import pytest

pytest.importorskip("typer")
import torch

from residua.errors import InputError
from residua.hosts import make_report
from residua.tools.bench import sweep
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.output import write_json
from residua.tools.reports.figure import Drawing
from residua.util.files import write_text_whole
from tests.support.command import run

BENCH = ("--heads", "1", "--head-dim", "16", "--repeats", "1", "--backend", "torch")


@contextmanager
def full_disk(bytes_left: int = 2000):
    """Files cannot grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def long_report():
    return dataclasses.replace(make_report([]), notes=("x" * 9000,))


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def one_line(found, status: int = 2) -> str:
    assert found.exit_code == status, found.output
    assert "Traceback" not in found.output
    [line] = [line for line in found.output.splitlines() if line.startswith("error:")]
    return line


def test_a_capture_on_a_full_disk_keeps_the_calls_before(tmp_path):
    """`save_file` raises an error of its own, which is no OSError."""
    q, k, v = torch.randn(3, 600, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    writer = CaptureWriter(tmp_path / "c", "tiny")
    writer.add(q, k, v, layer=0, head=0, step=0)
    with full_disk(), pytest.raises(InputError, match=r"could not be written .*File too large"):
        writer.add(q, k, v, layer=0, head=1, step=0)
    assert [call.head for call in read_captures(tmp_path / "c")] == [0]
    assert listing(tmp_path / "c") == ["L0_H0_S0_all.safetensors", "manifest.json"]
    again = CaptureWriter(tmp_path / "c", "tiny")
    assert again.add(q, k, v, layer=0, head=1, step=0) and len(again) == 2


@pytest.mark.slow
def test_the_command_that_captures(tmp_path):
    pytest.importorskip("diffusers")
    given = ("capture", "--layers", "0", "--heads", "0", "--run-steps", "2", "--size", "32", "--frames", "8")
    found = run(*given, "--steps", "0", "--out", tmp_path / "c")
    assert found.exit_code == 0, found.output
    before = listing(tmp_path / "c")
    with full_disk():
        found = run(*given, "--steps", "0,1", "--out", tmp_path / "c")
    assert "could not be written" in one_line(found) and listing(tmp_path / "c") == before
    assert run(*given, "--steps", "0,1", "--out", tmp_path / "c").exit_code == 0
    assert len(read_captures(tmp_path / "c")) == 2 * (len(before) - 1)


def test_a_benchmark_that_cannot_be_written_is_refused_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("residua.tools.bench.attention.measure", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link.json").symlink_to(tmp_path / "file")
    for name, says in (("file/out.json", "not a folder"), ("file", "--force"), ("link.json", "is a link")):
        found = run("bench", "attention", "--tokens", "64", *BENCH, "--json", tmp_path / name)
        assert says in one_line(found)
    if os.geteuid():  # root may write anywhere
        tmp_path.chmod(0o500)
        found = run("bench", "attention", "--tokens", "64", *BENCH, "--json", tmp_path / "out.json")
        assert "can be written to" in one_line(found)
        tmp_path.chmod(0o700)
    assert (tmp_path / "file").read_text() == "mine" and listing(tmp_path) == ["file", "link.json"]


def test_a_benchmark_on_a_full_disk_shows_its_figures(tmp_path):
    with full_disk(100):
        found = run("bench", "attention", "--tokens", "64", *BENCH, "--json", tmp_path / "out.json")
    assert "File too large" in one_line(found) and "speed" in found.output and listing(tmp_path) == []


def test_a_sweep_keeps_what_it_has_measured(tmp_path, monkeypatch):
    """Ctrl-C or a full disk in the middle: the rows before are in the file."""
    from residua.tools.bench import attention as measuring

    measure, calls = measuring.measure, []

    def second_time(task, *rest):
        calls.append(task)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return measure(task, *rest)

    monkeypatch.setattr(measuring, "measure", second_time)
    found = run("bench", "sweep", "--tokens", "64,128", "--densities", "0.5", *BENCH, "--out", tmp_path)
    assert found.exit_code == 130 and "stopped" in found.output
    assert listing(tmp_path) == ["sweep.json"]
    assert (tmp_path / "sweep.json").read_text().count('"tokens": 64') == 1


@pytest.mark.parametrize("kind", ["text", "json", "report", "plot"])
def test_whole_or_not_at_all_and_never_through_a_link(kind, tmp_path):
    write = {
        "text": lambda path: write_text_whole(path, "x" * 9000),
        "json": lambda path: write_json(path, ["x" * 9000]),
        "report": lambda path: long_report().save(path),
        "plot": lambda path: sweep.write_drawings({path.name: Drawing(b"x" * 9000, "")}, path.parent),
    }[kind]
    target, path = tmp_path / "mine", tmp_path / "out.json"
    target.write_text("mine")
    path.symlink_to(target)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(path)
    assert path.is_symlink() and listing(tmp_path) == ["mine", "out.json"]
    write(path)
    assert not path.is_symlink() and path.stat().st_size > 2000 and target.read_text() == "mine"

"""Results on disk: refused where something is in the way, whole or not at all."""

import dataclasses
import json
import os
import resource
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from residua.errors import InputError
from residua.tools import output
from residua.tools.output import MARKER, OutputError, check_folder, publish_files, publish_folder, write_json
from tests.support.interrupt import entries, interrupted_at


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_written_and_marked(tmp_path):
    out = tmp_path / "deep" / "out"
    publish_folder(out, {"a.txt": b"a", "b.txt": b"b"})
    assert listing(out) == [MARKER, "a.txt", "b.txt"] and (out / "b.txt").read_bytes() == b"b"
    assert listing(out.parent) == ["out"]


def test_results_of_an_earlier_run_go_and_other_files_stay(tmp_path):
    out = tmp_path / "out"
    publish_folder(out, {"a.txt": b"a", "old.txt": b"old"})
    (out / "mine.txt").write_text("mine")
    publish_folder(out, {"a.txt": b"new"})
    assert listing(out) == [MARKER, "a.txt", "mine.txt"] and (out / "a.txt").read_bytes() == b"new"


def test_a_marker_cannot_name_files_elsewhere(tmp_path):
    out, outside = tmp_path / "out", tmp_path / "precious.txt"
    outside.write_text("precious")
    out.mkdir()
    (out / MARKER).write_text(f"../precious.txt\n{outside}\n..\n")
    publish_folder(out, {"a.txt": b"a"})
    assert outside.read_text() == "precious"


def test_taken_folders_are_refused_unless_forced(tmp_path):
    out = tmp_path / "out"
    check_folder(out, force=False)
    out.mkdir()
    check_folder(out, force=False)  # an empty folder is nobody's
    (out / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="did not write"):
        check_folder(out, force=False, reuse=True)
    check_folder(out, force=True)
    publish_folder(out, {"a.txt": b"a"})
    check_folder(out, force=False, reuse=True)
    with pytest.raises(InputError, match="--force"):
        check_folder(out, force=False)


def test_links_and_files_in_the_way_are_refused(tmp_path):
    real, link, plain = tmp_path / "real", tmp_path / "link", tmp_path / "plain"
    real.mkdir()
    link.symlink_to(real)
    plain.write_text("")
    for path, message in ((link, "is a link"), (plain, "is a file")):
        with pytest.raises(InputError, match=message):
            check_folder(path, force=True)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (real / "a.txt").symlink_to(victim)
    with pytest.raises(InputError, match="is a link"):
        publish_folder(real, {"a.txt": b"attack"})
    assert victim.read_text() == "untouched"


@contextmanager
def full_disk():
    """Writes beyond a few kilobytes fail, as on a full disk. No fixture: pytest itself may write to a file
    before a fixture ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_results(tmp_path):
    out = tmp_path / "out"
    publish_folder(out, {"a.txt": b"old"})
    with full_disk(), pytest.raises(OutputError, match="nothing was changed"):
        publish_folder(out, {"a.txt": b"new", "b.bin": bytes(100_000)})
    with full_disk(), pytest.raises(OutputError, match="nothing was changed"):
        publish_files({tmp_path / "x.txt": b"x", tmp_path / "y.bin": bytes(100_000)})
    assert listing(tmp_path) == ["out"] and listing(out) == [MARKER, "a.txt"]
    assert (out / "a.txt").read_bytes() == b"old"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="could not be written"):
        publish_folder(tmp_path / "file" / "out", {"a.txt": b"a"})


def test_interrupted_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(path, content):
        path.write_bytes(content[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(tmp_path / "out", {"a.txt": b"aaa"})
    with pytest.raises(KeyboardInterrupt):
        publish_files({tmp_path / "a.txt": b"aaa"})
    assert listing(tmp_path) == []


@pytest.fixture
def ctrl_c():
    """Ctrl-C as on a terminal: a process that a shell put into the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_the_renames(tmp_path, monkeypatch):
    replace = os.replace

    def interrupting(source, target):
        os.kill(os.getpid(), signal.SIGINT)
        replace(source, target)

    monkeypatch.setattr(output.os, "replace", interrupting)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(tmp_path / "out", {"a.txt": b"a", "b.txt": b"b"})
    assert listing(tmp_path) == ["out"] and listing(tmp_path / "out") == [MARKER, "a.txt", "b.txt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "publish",
    [
        lambda folder: publish_folder(folder / "out", {"a.txt": b"a", "b.txt": b"b"}),
        lambda folder: publish_files({folder / "a.txt": b"a", folder / "b.txt": b"b"}),
    ],
    ids=["folder", "files"],
)
def test_ctrl_c_anywhere_leaves_no_scratch(publish, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    for place, times in entries(lambda: publish(whole)).items():
        for entry in range(1, times + 1):
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            with pytest.raises(KeyboardInterrupt), interrupted_at(dataclasses.replace(place, entry=entry)):
                publish(folder)
            assert not [name for name in listing(folder) if name.startswith(".")], (place, entry)


def test_json_is_written_whole(tmp_path):
    write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"x": 1}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]

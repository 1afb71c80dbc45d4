"""The folder of a suite: whole rows or none, one run at a time, and no rows of another suite."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from residua.errors import InputError
from residua.tools import output
from residua.tools.evaluate.manifest import check_manifest
from residua.tools.evaluate.rows import hash_model, make_rows
from residua.tools.evaluate.store import DONE, FAILED, Store
from residua.tools.evaluate.suite import Setting
from residua.tools.output import OutputError


@pytest.fixture
def store(tmp_path) -> Store:
    made = Store(tmp_path / "out")
    made.prepare()
    return made


def test_a_row_comes_back_as_it_went(store):
    part = {"name": "layer 0", "density": 0.25, "cost": 0.5, "error": None}
    store.write_row({"id": "r", "status": DONE, "seed": 2**62, "psnr": 31.25, "layers": [part]})
    found = store.read_row("r")
    assert found["seed"] == 2**62 and found["psnr"] == 31.25 and found["layers"] == [part]
    assert found["ssim"] is None and found["steps"] is None
    assert [path.name for path in (store.folder / "rows").iterdir()] == ["r.parquet"]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 40 + b"PAR1"])
def test_a_row_that_cannot_be_read_counts_as_missing(store, content):
    (store.folder / "rows" / "r.parquet").write_bytes(content)
    assert store.read_row("r") is None and store.read_rows() == []


def test_a_row_under_another_name_counts_as_missing(store):
    store.write_row({"id": "a", "status": DONE})
    os.rename(store.folder / "rows" / "a.parquet", store.folder / "rows" / "b.parquet")
    assert store.read_row("b") is None


def test_done_rows_need_their_video_and_failed_ones_can_be_tried_again(store, make_suite):
    rows = make_rows(make_suite(1), "m")
    for row, status in zip(rows, (DONE, DONE, FAILED), strict=True):
        store.write_row({**vars(row), "status": status})
    (store.folder / rows[0].video).parent.mkdir(parents=True)
    store.write_video(rows[0], b"video")
    assert [row["id"] for row in store.finished(rows)] == [rows[0].id, rows[2].id]
    store.drop_failed()
    assert [row["id"] for row in store.finished(rows)] == [rows[0].id]


def test_a_full_disk_leaves_nothing_half_written(store, monkeypatch):
    def full(path, content):
        path.write_bytes(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "_write", full)
    with pytest.raises(OutputError, match="No space left"):
        store.write_row({"id": "r", "status": DONE})
    assert list((store.folder / "rows").iterdir()) == []


def test_two_runs_on_one_folder_are_refused(store):
    with store.locked(), pytest.raises(InputError, match=f"in use by another run.*{os.getpid()}"), store.locked():
        pass
    with store.locked():  # and it is free again
        pass


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.doc").write_text("x")
    with pytest.raises(InputError, match=r"holds thesis.doc and no manifest.json"):
        Store(tmp_path).prepare()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(InputError, match="is a link"):
        Store(link).prepare()


@pytest.mark.parametrize("name", ["running", "logs", "videos", "report", "videos/paper", "lock", "logs/id.log"])
def test_a_link_in_the_folder_of_somebody_else_is_not_followed(tmp_path, name):
    """`running` is emptied, the lock is cut to nothing, logs grow: a link could make that anybody's files."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("mine")
    folder = tmp_path / "out"
    link = folder / name
    link.parent.mkdir(parents=True)
    link.symlink_to(mine / "precious" if name in ("lock", "logs/id.log") else mine)
    store = Store(folder)
    if name == "logs/id.log":
        store.prepare()
        store.log("id", "a prompt")  # a log must not stop a run
    else:
        with pytest.raises((InputError, OSError)):
            store.prepare()
            store.prepare_videos("paper")
            with store.locked():
                store.clear_unfinished()
    assert [path.name for path in mine.iterdir()] == ["precious"]
    assert (mine / "precious").read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY half", b"PK\x03\x04", b"text"])
def test_frames_that_cannot_be_read_are_made_again(store, content):
    store.write_reference("id", np.zeros((1, 2, 2, 3), dtype=np.float16))
    assert store.read_reference("id") is not None and store.references() == {"id"}
    (store.folder / "references" / "id.npy").write_bytes(content)
    assert store.read_reference("id") is None and store.references() == set()


@pytest.mark.parametrize("mark", ["[]", '{"run": "r", "phase": "p", "host": "h", "attempt": "x", "pid": 1}'])
def test_a_mark_that_nobody_wrote_counts_for_nothing(store, mark):
    (store.folder / "running" / "id").write_text(mark)
    assert not store.is_running("id") and store.begin("id", "r", "making") == (1, "")


def test_frames_that_wait_for_their_dense_clip(store):
    frames = np.arange(24, dtype=np.float16).reshape(1, 2, 4, 3)
    store.write_waiting("r", {"seconds": 1.5, "layers": [{"name": "a"}]}, frames)
    result, found = store.read_waiting("r")
    assert result == {"seconds": 1.5, "layers": [{"name": "a"}]} and np.array_equal(found, frames)
    store.drop_waiting("r")
    assert store.read_waiting("r") is None


def test_attempts_are_counted_within_a_run(store):
    assert store.begin("r", "run 1", "loading") == (1, "")
    store.phase("r", "run 1", "making", 1)
    assert store.begin("r", "run 1", "loading") == (2, "making")
    assert store.begin("r", "run 2", "making") == (1, "")
    assert store.is_running("r") and store.running() == 1
    store.end("r")
    assert not store.is_running("r") and store.running() == 0


def test_a_worker_that_is_gone_makes_nothing(store):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    store.begin("r", "run", "making")
    mark = store.folder / "running" / "r"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "pid": pid}))
    assert not store.is_running("r")


def test_what_killed_workers_leave_is_removed(store, make_suite, monkeypatch):
    row = make_rows(make_suite(1), "m")[0]
    (store.folder / row.video).parent.mkdir()
    (store.folder / row.video).with_name(".of the user").touch()

    def killed(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(output, "_write", killed)
        patch.setattr(output.Path, "unlink", lambda *_, **__: None)  # nobody clears up
        for write in (
            lambda: store.write_row({"id": "r", "status": DONE}),
            lambda: store.write_video(row, b"video"),
            lambda: store.write_reference("r", np.zeros((1, 2, 2, 3))),
            lambda: store.write_waiting("r", {}, np.zeros((1, 2, 2, 3))),
            lambda: store.begin("r", "run", "making"),
        ):
            with pytest.raises(KeyboardInterrupt):
                write()

    def left():
        return [path.name for path in store.folder.rglob("*") if path.is_file()]

    assert len(left()) == 6
    store.clear_unfinished()
    assert left() == [".of the user"]


def manifest(suite):
    return check_manifest(None, suite, False, None)


def test_the_same_suite_goes_on(make_suite):
    suite = make_suite(2)
    found = check_manifest(manifest(suite), suite, False, None)
    assert found["model_hash"] == hash_model(suite.model)


def test_a_suite_that_grew_needs_extend(make_suite):
    small, large = make_suite(1), make_suite(2, seeds=(0, 1))
    with pytest.raises(InputError, match="was made without seed 1 and others: add --extend"):
        check_manifest(manifest(small), large, False, "out")
    assert len(check_manifest(manifest(small), large, True, "out")["suite"]["prompts"]) == 2


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: replace(s, generation=replace(s.generation, steps=9)), "steps was 2 and is 9"),
        (lambda s: replace(s, model="other"), "model was"),
        (lambda s: replace(s, seeds=(1, 0)), "new ones belong at the end"),
        (lambda s: replace(s, prompts=s.prompts[1:]), "no longer has"),
        (lambda s: replace(s, settings=(*s.settings[:-1], Setting("paper", {"density": 0.3}))), "paper"),
    ],
)
def test_another_suite_is_refused_even_with_extend(make_suite, change, says):
    suite = make_suite(2)
    with pytest.raises(InputError, match=says):
        check_manifest(manifest(suite), change(suite), True, "out")


def test_another_model_under_the_same_name_is_refused(make_suite):
    suite = make_suite(1)
    with pytest.raises(InputError, match="have changed"):
        check_manifest({**manifest(suite), "model_hash": "other"}, suite, True, "out")


def test_a_path_that_is_not_utf_8_is_refused_before_anything_runs(tmp_path):
    folder = tmp_path / os.fsdecode(b"out\xff")
    with pytest.raises(InputError, match="valid UTF-8"):
        Store(folder).prepare()
    assert not folder.exists()

"""Whole runs as a plain loop: what is made, what fails, what is made again."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from residua.errors import InputError
from residua.tools import output
from residua.tools.cli.evaluate_progress import Board
from residua.tools.evaluate.engine import PlainLoop, StoppedError
from residua.tools.evaluate.generate import Generate
from residua.tools.evaluate.measure import Measure
from residua.tools.evaluate.records import Job
from residua.tools.evaluate.rows import make_rows
from residua.tools.evaluate.run import Options, Watcher, evaluate
from residua.tools.evaluate.store import DONE, Store
from residua.tools.generate import loading
from residua.tools.generate.loading import load
from tests.support.command import run as residua

POISON = "a purple elephant"


class Heard(Watcher):
    def __init__(self) -> None:
        self.summaries: list[dict] = []

    def told(self, summary) -> None:
        self.summaries.append(summary)


def go(suite, out, **options) -> Heard:
    heard = Heard()
    evaluate(suite, out, Options(**options), heard, PlainLoop())
    return heard


def hashes(out: Path) -> dict[str, str]:
    return json.loads((out / "manifest.json").read_text())["hashes"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.fixture
def whole(make_suite, finished):
    """A suite that has run, once for all tests that only read it."""
    suite = make_suite(2, seeds=(0, 1), noise_floor=True)
    if not finished.exists():
        go(suite, finished)
    return suite, finished


def test_every_row_is_there_with_what_was_measured(whole):
    _, out = whole
    rows = Store(out).read_rows()
    assert len(rows) == 2 * 2 * 4 and all(row["status"] == "done" for row in rows)
    by = {(row["prompt"], row["seed"], row["setting"]): row for row in rows}
    for row in rows:
        dense = by[row["prompt"], row["seed"], "dense"]
        assert row["reference"] == dense["id"] and (out / row["video"]).stat().st_size > 500
        assert row["seconds"] > 0 and row["hash"] and row["pipeline"] == "WorldPipeline"
        assert row["physics_error"] is not None and row["physics_kept"] is not None
        if row["setting"] in ("anchored", "paper"):
            assert row["psnr"] > 5 and row["ssim"] < 1 and not row["identical"] and 0 < row["density"] <= 0.41
            assert row["cost"] > 0 and row["sparse_calls"] == 4 and len(row["layers"]) == len(row["steps"]) == 2
            assert row["pflops"] < row["dense_pflops"] and row["hash"] != dense["hash"]
            assert "no LPIPS weights" in json.loads(row["not_measured"])["lpips"] and row["lpips"] is None
        elif row["setting"] == "dense":
            assert row["psnr"] is None and row["physics_dense_error"] == 0.0
        else:
            assert row["identical"] or row["psnr"] > 60  # dense, summed in another order
    seeds = {row["hash"] for row in rows if row["setting"] == "dense"}
    assert len(seeds) == 4


def test_a_run_that_is_done_makes_nothing(whole):
    suite, out = whole
    before = hashes(out)
    assert go(suite, out).summaries == [] and hashes(out) == before


def test_the_manifest_says_what_made_it(whole):
    _, out = whole
    found = json.loads((out / "manifest.json").read_text())
    assert set(found["hashes"]) == {row["id"] for row in Store(out).read_rows()}
    assert found["suite"]["seeds"] == [0, 1] and found["runs"][0]["versions"]["ray"]
    assert found["suite"]["settings"][2]["options"]["density"] == 0.4


def test_every_row_has_a_log(whole):
    _, out = whole
    for row in Store(out).read_rows():
        text = (out / "logs" / f"{row['id']}.log").read_text()
        assert row["prompt"] in text and "made in" in text and text.rstrip().endswith("done")


def test_what_is_missing_is_made_again_with_the_same_hashes(make_suite, tmp_path):
    suite = make_suite(1)
    go(suite, tmp_path / "out")
    before, store = hashes(tmp_path / "out"), Store(tmp_path / "out")
    paper = next(row for row in store.read_rows() if row["setting"] == "paper")
    (store.folder / paper["video"]).unlink()
    assert [one["id"] for one in go(suite, store.folder).summaries] == [paper["id"]]
    assert hashes(store.folder) == before
    (store.folder / "rows" / f"{paper['id']}.parquet").write_bytes(b"half a r")
    store.drop_references()
    made = [one["setting"] for one in go(suite, store.folder).summaries]
    assert made == ["dense", "paper"] and hashes(store.folder) == before


def test_a_suite_can_grow(make_suite, tmp_path):
    go(make_suite(1), tmp_path / "out")
    with pytest.raises(InputError, match="--extend"):
        go(make_suite(2), tmp_path / "out")
    heard = go(make_suite(2), tmp_path / "out", extend=True)
    assert len(heard.summaries) == 3 and len(hashes(tmp_path / "out")) == 6
    rows = pq.read_table(tmp_path / "out" / "report" / "rows.parquet").to_pylist()
    assert len(rows) == 6


def test_a_poisoned_prompt_fails_alone_and_is_tried_again_only_on_demand(make_suite, tmp_path):
    good = "a red rubber ball dropped on a sand floor at noon"
    suite = make_suite([POISON, good])
    out = tmp_path / "out"
    heard = go(suite, out)
    status = {(one["setting"], one["status"]) for one in heard.summaries}
    assert status == {(name, state) for name in ("dense", "anchored", "paper") for state in ("done", "failed")}
    failed = [row for row in Store(out).read_rows() if row["status"] == "failed"]
    assert {row["prompt"] for row in failed} == {POISON} and len(hashes(out)) == 3
    assert all("prompt 'a purple elephant'" in row["reason"] and row["attempts"] == 1 for row in failed)
    report = json.loads((out / "report" / "report.json").read_text())
    assert len(report["data"]["failed"]) == 3 and any("3 of 6 rows failed" in text for text in report["warnings"])
    assert go(suite, out).summaries == []
    assert len(go(suite, out, retry_failed=True).summaries) == 3


def failing(monkeypatch, times: int) -> None:
    module = importlib.import_module("residua.tools.evaluate.generate")
    left = [times]
    real = module.generate_once

    def sometimes(*arguments, **more):
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("CUDA error: unspecified launch failure")
        return real(*arguments, **more)

    monkeypatch.setattr(module, "generate_once", sometimes)


@pytest.mark.parametrize("times, failed", [(1, 0), (2, 3)])
def test_what_may_pass_is_tried_again_but_not_for_ever(make_suite, tmp_path, monkeypatch, times, failed):
    failing(monkeypatch, times)
    suite = make_suite(1)
    go(suite, tmp_path / "out")
    rows = Store(tmp_path / "out").read_rows()
    assert sum(row["status"] == "failed" for row in rows) == failed
    dense = next(row for row in rows if row["setting"] == "dense")
    assert dense["attempts"] == 2
    if failed:
        others = [row["reason"] for row in rows if row["setting"] != "dense"]
        assert "launch failure" in dense["reason"] and all("its dense clip failed" in text for text in others)


def test_a_full_disk_stops_the_run_and_the_next_one_goes_on(make_suite, tmp_path, monkeypatch):
    suite, out = make_suite(2), tmp_path / "out"
    go(suite, tmp_path / "reference")
    written, real = [], output._write

    def full(path, content):
        written.append(path)
        if len(written) > 14:
            raise OSError(28, "No space left on device")
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(output, "_write", full)
        with pytest.raises(StoppedError, match=r"No space left on device.*run the same command again"):
            go(suite, out)
    done = len(Store(out).read_rows())
    assert 0 < done < 6
    assert len(go(suite, out).summaries) == 6 - done
    assert hashes(out) == hashes(tmp_path / "reference")


def test_a_model_that_cannot_be_loaded_stops_the_run(make_suite, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "WorldPipeline"}')
    with pytest.raises(StoppedError, match="cannot be loaded"):
        go(make_suite(1, model=str(folder)), tmp_path / "out")
    assert Store(tmp_path / "out").read_rows() == []


def test_a_clip_whose_dense_clip_is_not_there_waits_for_it(make_suite, tmp_path):
    suite, store = make_suite(1), Store(tmp_path)
    store.prepare()
    dense, anchored, _ = make_rows(suite, "m")
    job = Job(suite, tmp_path, "run")
    for row in (dense, anchored):
        (tmp_path / row.video).parent.mkdir(parents=True)
    make, measure = Generate(job), Measure(job)
    assert measure(make({"row": anchored.to_json()}))["status"] == "waiting"
    assert store.read_row(anchored.id) is None
    assert measure(make({"row": dense.to_json()}))["status"] == "done"
    unable = Generate(replace(job, suite=replace(suite, model="nowhere/to be found")))
    found = measure(unable({"row": anchored.to_json()}))  # what was put aside needs no model
    assert found["status"] == "done" and store.read_waiting(anchored.id) is None


def test_a_row_that_kills_its_workers_fails_and_a_model_that_does_stops_the_run(make_suite, tmp_path):
    suite, store = make_suite(1), Store(tmp_path)
    store.prepare()
    row = make_rows(suite, "m")[0]
    make = Generate(Job(suite, tmp_path, "run"))
    for _ in range(suite.work.retries + 1):  # as attempts do that die
        attempt, _ = store.begin(row.id, "run", "loading")
        store.phase(row.id, "run", "making", attempt)
    found = make({"row": row.to_json()})
    assert found["status"] == "failed" and "the worker died 2 times" in found["reason"]
    for _ in range(suite.work.retries + 1):
        store.begin(row.id, "run", "loading")
    found = make({"row": row.to_json()})
    assert found["status"] == "stop" and "while it loaded" in found["reason"]


def test_the_pipeline_is_loaded_once(make_suite, tmp_path, monkeypatch):
    loads = []
    monkeypatch.setattr(loading, "load", lambda *given: loads.append(given) or load(*given))
    go(make_suite(2), tmp_path / "out")
    assert len(loads) == 1


SUITE = """
model = "{model}"
[prompts]
texts = {texts}
[generation]
steps = 2
size = "16"
frames = 8
[settings.paper]
method = "paper"
density = 0.4
min_tokens = 0
[metrics]
floor = false
[run]
device = "cpu"
"""


def test_the_command(weights, tmp_path):
    path, out = tmp_path / "suite.toml", tmp_path / "out"
    texts = ["a red rubber ball dropped on a sand floor at noon", "<script>alert(1)</script>"]
    path.write_text(SUITE.format(model=weights, texts=json.dumps(texts)))
    found = residua("evaluate", path, "--out", out, "--ray", "off")
    assert found.exit_code == 3, found.output
    assert "2 of 4 rows done, 2 failed" in found.output and "4 of 4 rows" in found.output
    page = (out / "report" / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;alert" in page and "prefers-color-scheme" in page
    assert "../videos/paper/a%20red%20rubber%20ball" in page and str(tmp_path) not in page
    again = residua("evaluate", path, "--out", out, "--ray", "off")
    assert again.exit_code == 3 and "2 of 4 rows done" in again.output
    path.write_text(path.read_text().replace("steps = 2", "steps = 3"))
    refused = residua("evaluate", path, "--out", out, "--ray", "off")
    assert refused.exit_code == 2 and "steps was 2 and is 3" in refused.output


@pytest.mark.parametrize("done, title", [(1, "1 of 3 rows, 0 running, time unknown left"), (3, "0:00:00 left")])
def test_the_table_of_a_run_that_is_done_has_no_time_left(make_suite, tmp_path, done, title):
    suite = make_suite(1)
    rows, board = make_rows(suite, "model"), Board(suite)
    known = {"status": DONE, "psnr": None, "seconds": 1.0}
    board.begin(rows, [{"id": row.id, "setting": row.setting, **known} for row in rows[:done]], Store(tmp_path))
    assert title in str(board.__rich__().title)


def test_a_suite_that_is_wrong_is_one_line(tmp_path):
    (tmp_path / "s.toml").write_text("modle = 1\n")
    found = residua("evaluate", tmp_path / "s.toml", "--out", tmp_path / "out")
    assert found.exit_code == 2 and "model is missing" in found.output and not (tmp_path / "out").exists()


def test_measuring_leaves_the_threads_of_the_loop_alone(make_suite, tmp_path):
    """Otherwise every clip after the first would be generated on one thread."""
    before = torch.get_num_threads()
    suite = make_suite(1)
    try:
        go(replace(suite, work=replace(suite.work, threads=2)), tmp_path / "out")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

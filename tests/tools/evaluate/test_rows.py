"""Rows: names that never change, files that scorers find, and an order in which nothing waits."""

from dataclasses import replace
from pathlib import Path

import pytest

from residua.errors import InputError
from residua.tools.evaluate.prompts import Prompt
from residua.tools.evaluate.rows import Row, hash_model, in_working_order, make_rows, missing_rows


def test_ids_depend_on_what_a_row_is_and_not_on_the_others(make_suite):
    suite = make_suite(2, seeds=(0, 1))
    rows = make_rows(suite, "m")
    assert len({row.id for row in rows}) == len(rows) == 2 * 2 * 3
    turned = replace(suite, prompts=suite.prompts[::-1], settings=suite.settings[:2])
    assert {row.id for row in make_rows(turned, "m")} <= {row.id for row in rows}
    assert not {row.id for row in make_rows(suite, "other")} & {row.id for row in rows}
    longer = replace(suite, generation=replace(suite.generation, steps=3))
    assert not {row.id for row in make_rows(longer, "m")} & {row.id for row in rows}


def test_every_row_knows_its_dense_row_and_survives_json(make_suite):
    rows = make_rows(make_suite(2), "m")
    dense = {row.pair: row.id for row in rows if row.setting == "dense"}
    assert all(row.reference == dense[row.pair] for row in rows)
    assert [Row.from_json(row.to_json()) for row in rows] == rows


def test_videos_are_named_as_vbench_and_pbench_look_for_them(make_suite):
    suite = make_suite(["a cat, walking"], seeds=(7, 5))
    videos = [row.video for row in make_rows(suite, "m") if row.setting == "paper"]
    assert videos == ["videos/paper/a cat, walking-0.mp4", "videos/paper/a cat, walking-1.mp4"]
    named = replace(suite, prompts=(Prompt("a robot", "video_7"),))
    assert make_rows(named, "m")[0].video == "videos/dense/video_7__7.mp4"


def test_prompts_that_no_file_can_be_called_get_a_name_of_their_own(make_suite):
    texts = ["a/b", "a_b", "x" * 400, "x" * 401, "../up", "\n", "日本" * 90]
    videos = [row.video for row in make_rows(make_suite(texts), "m") if row.setting == "dense"]
    assert len(set(videos)) == len(texts) and videos[1] == "videos/dense/a_b-0.mp4"
    for video in videos:
        assert Path(video).parent == Path("videos/dense") and len(Path(video).name.encode()) < 255
        assert not Path(video).name.startswith(".")


def test_dense_rows_run_ahead_of_what_is_compared_with_them(make_suite):
    rows = make_rows(make_suite(4), "m")
    order = in_working_order(rows, 2)
    assert [row.setting for row in order[:5]] == ["dense", "dense", "anchored", "paper", "dense"]
    assert sorted(row.id for row in order) == sorted(row.id for row in rows)
    assert in_working_order(rows, 0) == rows


def test_a_dense_row_is_made_again_only_if_others_need_its_frames(make_suite):
    rows = make_rows(make_suite(1), "m")
    dense, anchored, paper = rows
    assert missing_rows(rows, {row.id for row in rows}, set()) == []
    assert missing_rows(rows, {dense.id, paper.id}, {dense.id}) == [anchored]
    assert missing_rows(rows, {dense.id, paper.id}, set()) == [dense, anchored]


def test_models_are_told_apart_by_their_files(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    first = hash_model(str(tmp_path))
    (tmp_path / "weights").write_bytes(b"1")
    assert len({first, hash_model(str(tmp_path)), hash_model("a/b"), hash_model("a/c")}) == 4


def test_two_clips_for_one_file_are_refused(make_suite):
    suite = make_suite(1)
    for prompts in ((Prompt("one", "same"), Prompt("two", "same")), (Prompt("a/b"), Prompt("a_b f5effa31"))):
        with pytest.raises(InputError, match="would have this name"):
            make_rows(replace(suite, prompts=prompts), "m")


def test_more_rows_than_anybody_can_make_are_refused_at_once(make_suite):
    suite = make_suite(2, seeds=range(100_000))
    with pytest.raises(InputError, match="2 prompts x 100000 seeds x 3 settings are 600,000 rows"):
        make_rows(suite, "hash")


def test_ten_thousand_rows_have_names_of_their_own(make_suite):
    rows = make_rows(make_suite([f"prompt {number}" for number in range(1700)], seeds=(0, 1)), "m")
    assert len({row.id for row in rows}) == len({row.video for row in rows}) == len(rows) == 10200
    assert len(in_working_order(missing_rows(rows, set(), set()), 2)) == len(rows)

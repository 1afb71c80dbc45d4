"""Scores of others join the rows they belong to, or say why not."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from residua.errors import InputError
from residua.tools.evaluate.scorers import from_results, join_scores, read_scores

ROWS = [
    {"id": "d", "setting": "dense", "prompt": "a cat", "seed": 0, "video": "videos/dense/a cat-0.mp4", "hash": "1"},
    {"id": "p", "setting": "paper", "prompt": "a cat", "seed": 0, "video": "videos/paper/a cat-0.mp4", "hash": "2"},
]
FAKE = """
import json, os
class VBench:
    def __init__(self, device, info, out):
        assert device == "cpu"
        self.out = out
    def evaluate(self, videos_path, name, dimension_list, prompt_list, mode):
        paths = [os.path.join(videos_path, key) for key in prompt_list]  # as VBench 0.1.5 does
        assert mode == "custom_input" and all(os.path.isfile(path) for path in paths)
        with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as calls:
            calls.write(name + "\\n")
        result = {}
        for dimension in dimension_list:
            each = 50.0 if dimension == "imaging_quality" else 0.25
            found = [{"video_path": path, "video_results": each} for path in paths]
            result[dimension] = [0.5, found]
        json.dump(result, open(os.path.join(self.out, name + "_eval_results.json"), "w"))
"""


@pytest.fixture
def folder(tmp_path):
    for row in ROWS:
        (tmp_path / row["video"]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / row["video"]).write_bytes(b"x")
    return tmp_path


def test_a_scorer_that_is_not_installed_is_a_reason(folder, make_suite):
    scores, reasons = join_scores(folder, make_suite(1, scorers=("vbench", "pbench")), ROWS)
    assert scores == {} and "pip install vbench" in reasons["vbench"] and "physical-ai-bench" in reasons["pbench"]


def test_a_scorer_runs_once_on_the_same_clips(folder, make_suite, monkeypatch):
    package = folder / "packages" / "vbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(folder)
    suite, folder = make_suite(1, scorers=("vbench",)), Path()  # as in `--out .`
    try:
        scores, reasons = join_scores(folder, suite, ROWS)
        assert reasons == {} and set(scores) == {"d", "p"}
        assert scores["p"] == {"vbench imaging_quality": 0.5, "vbench subject_consistency": 0.25}
        assert join_scores(folder, suite, ROWS) == (scores, {})
        assert sorted((package / "calls").read_text().split()) == ["vbench-dense", "vbench-paper"]
        join_scores(folder, suite, [ROWS[0], {**ROWS[1], "hash": "3"}])
        assert (package / "calls").read_text().split().count("vbench-paper") == 2
    finally:
        sys.modules.pop("vbench", None)


def test_results_of_vbench_are_joined_by_video():
    results = {
        "imaging_quality": [0.6, [{"video_path": "/else/paper/a cat-0.mp4", "video_results": 70.0}]],
        "subject_consistency": [0.9, [{"video_path": "dense/a cat-0.mp4", "video_results": float("nan")}]],
        "broken": "text",
    }
    assert from_results(results, ROWS, "vbench") == {"p": {"vbench imaging_quality": 0.7}}


def test_files_of_scores(folder, make_suite):
    (folder / "s.csv").write_text("setting,prompt,seed,taste\npaper,a cat,0,0.25\nnone,a cat,0,1\n")
    (folder / "s.jsonl").write_text(json.dumps({"setting": "dense", "prompt": "a cat", "seed": 0, "taste": 1}))
    suite = replace(make_suite(1), scores=(str(folder / "s.csv"), str(folder / "s.jsonl")))
    assert join_scores(folder, suite, ROWS)[0] == {"p": {"taste": 0.25}, "d": {"taste": 1.0}}


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("s.csv", "setting,prompt,taste\npaper,a cat,1\n", "row 1: wanted setting, prompt, seed"),
        ("s.csv", "setting,prompt,seed,taste\npaper,a cat,0,good\n", "taste = 'good' is not a number"),
        ("s.csv", "setting,prompt,seed,taste\npaper,a dog,0,1\n", "none of its rows belongs to this suite"),
        ("s.jsonl", "{", "not valid JSON lines"),
        ("s.json", "{}", "no score of a video of this suite"),
        ("s.txt", "x", "wanted .json, .jsonl or .csv"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        read_scores(tmp_path / name, ROWS)
    assert says in str(error.value)

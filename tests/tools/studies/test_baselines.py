"""The study of the baselines: every method on every call, and the command that writes the report."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from residua import Config
from residua.tools.capture.captures import CapturedCall, read_captures
from residua.tools.studies.baselines import Measurement, chosen_methods, cost_table, findings, measure_all, task_of
from residua.tools.synthetic import VideoLike, video_like
from tests.support.command import run


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    folder = tmp_path / "captures"
    folder.mkdir()
    for head in range(2):
        q, k, v = (x[0, 0] for x in video_like(VideoLike(grid=(4, 8, 8), heads=1, head_dim=16, seed=head)))
        tensors = {"q": q.half().contiguous(), "k": k.half().contiguous(), "v": v.half().contiguous()}
        save_file(tensors, folder / f"toy_L1_H{head}.safetensors", {"grid": "4x8x8", "scale": "0.25"})
    return folder


def test_text_tokens_are_left_out(captures):
    call = read_captures(captures)[0]
    with_text = CapturedCall(**{**vars(call), "text": ((250, 256),), "text_queries": ((0, 6),)})
    task = task_of(with_text, Config())
    assert (task.rows, task.keys) == (250, 250)
    assert torch.equal(task.q, call.load()[0][:, :, 6:]) and torch.equal(task.k, call.load()[1][:, :, :250])


def test_a_study_measures_every_method_on_every_call(captures):
    found, refused = measure_all(
        read_captures(captures), chosen_methods(["dense", "svg-ear", "paper", "anchored"]), Config(density=0.5)
    )
    assert [item.method for item in found] == 2 * ["dense", "svg-ear", "paper", "anchored"] and not refused
    for item in found:
        assert item.density <= item.charged <= (1.0 if item.method == "dense" else 0.5)
        assert item.charged == pytest.approx(item.density + item.beside * (item.method == "anchored"))
        assert item.mean <= item.p99 and item.cpu_seconds >= 0


def test_a_method_above_its_target_is_named(captures):
    found, _ = measure_all(read_captures(captures)[:1], chosen_methods(["svg2", "paper"]), Config(density=0.05))
    assert found[0].density > 0.05  # four query groups with one of eight K/V groups each
    table = cost_table(found, "toy", 0.05)
    assert "Above the target: SVG2, top-p in 1 of 1 calls" in table.note
    assert "Above" not in cost_table(found, "toy", 0.9).note


def measured(method: str, error: float, density: float, beside: float, charged: float) -> Measurement:
    return Measurement(
        "m", "c", method, density, 1, {}, beside, charged, 0.0, {}, error, error, error, error, None, 0.0, 0.0, "b"
    )


def test_what_is_beside_the_pairs_counts_against_the_target_of_anchored_alone():
    found = [measured("svg-ear", 0.2, 0.2, 0.5, 0.2), measured("anchored", 0.1, 0.2, 0.05, 0.25)]
    table = cost_table(found, "m", 0.22)
    assert "Above the target: anchored (Residua) in 1 of 1 calls, by 3.00 % at most" in table.note
    assert "SVG-EAR in" not in table.note
    assert [row[1:3] for row in table.rows] == [("20.00 %", "20.00 %"), ("25.00 %", "20.00 %")]


def test_the_paper_is_compared_with_published_methods_and_anchored_with_all():
    names = ("svg-ear", 0.3), ("paper", 0.2), ("anchored", 0.1), ("oracle", 0.01)
    first, second = findings([measured(name, error, 0.2, 0.0, 0.2) for name, error in names])
    assert first.holds and "best baseline is SVG-EAR" in first.evidence  # anchored is no published method
    assert second.holds and "SparsePR (the paper) with 0.2000" in second.evidence
    first, second = findings([measured(name, 0.5 - error, 0.2, 0.0, 0.2) for name, error in names])
    assert not first.holds and not second.holds
    assert len(findings([measured(name, error, 0.2, 0.0, 0.2) for name, error in names[:2]])) == 1


def test_the_command_writes_a_report_and_never_over_another(captures, tmp_path):
    out = tmp_path / "out"
    chosen = ["--methods", "dense,sta,svg2,pisa,paper", "--density", "0.3", "--groups", "8,16", "--quick"]
    first = run("baselines", captures, "--out", str(out), *chosen)
    assert first.exit_code == 0, first.output
    assert "SparsePR" in first.output and "toy, 2 calls: error" in first.output
    assert {path.name for path in out.iterdir()} >= {"report.html", "report.md", "report.json", "baselines.png"}
    found = json.loads((out / "report.json").read_text())
    assert len(found["data"]["measurements"]) == 10
    assert str(tmp_path) not in (out / "report.html").read_text() + (out / "report.md").read_text()
    second = run("baselines", captures, "--out", str(out), *chosen)
    assert second.exit_code == 2 and "--force" in second.output
    assert run("baselines", captures, "--out", str(out), "--force", *chosen).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "magic"], "method 'magic' is not known"),
        (["--density", "0"], "density"),
        (["--backend", "abacus"], "abacus"),
        (["--rules", "tpu"], "rules"),
        (["--groups", "64"], "two whole numbers"),
        (["--groups", "0,8"], "two whole numbers"),
    ],
)
def test_the_command_says_what_is_wrong(captures, tmp_path, arguments, says):
    found = run("baselines", captures, "--out", str(tmp_path / "out"), *arguments)
    assert found.exit_code == 2 and says in found.output
    assert not (tmp_path / "out").exists()


def test_a_folder_without_calls_is_refused(tmp_path):
    found = run("baselines", tmp_path, "--out", str(tmp_path / "out"))
    assert found.exit_code == 2 and "no captured calls" in found.output

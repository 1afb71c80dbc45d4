"""`residua compare --methods`: every method through the same pipeline, in one table."""

import json

import pytest
from PIL import Image

pytest.importorskip("typer")
from residua.errors import InputError
from residua.tools.generate.averages import DENSE, MeanRow, table
from residua.tools.generate.method_table import (
    MAX_WAITING,
    PARTS,
    chosen_methods,
    disturbed,
    read_pbench,
    runtime,
    title,
)
from tests.support.command import run

TINY = ("--size", "16", "--frames", "8", "--steps", "2", "--dense-steps", "1", "--min-tokens", "0")


def test_methods_are_compared_in_one_report(weights, tmp_path):
    scores = tmp_path / "pbench.json"
    scores.write_text(json.dumps({"dense": 0.8, "svg2": 0.7}))
    out = tmp_path / "out"
    found = run(
        "compare",
        "--model",
        weights,
        "--methods",
        "dense,svg2,paper,anchored",
        "--densities",
        "0.4",
        "--pbench",
        scores,
        "--out",
        out,
        *TINY,
    )
    assert found.exit_code == 0, found.output
    assert {path.name for path in out.iterdir()} >= {"report.html", "report.json", "runtime.png", "frames.png"}
    report = json.loads((out / "report.json").read_text())
    rows = {item["method"]: item for item in report["data"]["rows"]}
    assert list(rows) == ["dense", "dense again", "svg2", "paper", "anchored"]
    again = rows.pop("dense again")
    assert again["psnr"] > rows["anchored"]["psnr"] and again["speedup"] is None and not again["parts"]
    assert "dense again (the noise floor)" in (out / "report.md").read_text()
    assert rows["svg2"]["error"] is None and rows["anchored"]["error"] > 0
    assert all(rows[name]["psnr"] > 10 and rows[name]["density"] <= 0.41 for name in list(rows)[1:])
    assert all(rows[name]["pflops"] < rows["dense"]["pflops"] for name in list(rows)[1:])
    assert rows["dense"]["parts"]["dense"] > 0 and rows["paper"]["parts"]["grouping"] > 0
    columns = report["tables"][0]["columns"]
    assert "PBench" in columns and "LPIPS" not in columns and "ImgQual" not in columns
    assert "VBench is not installed" in found.output and "PBench was not" not in found.output
    assert "--densities 0.4" in report["command"] and "--partitions" not in report["command"]
    assert "SVG2, top-p" in (out / "report.md").read_text() and "Simplified:" in (out / "report.md").read_text()
    Image.open(out / "frames.png").verify()
    page = (out / "report.html").read_text()
    assert 'aria-label="Frames"' in page and "data:image/png;base64," in page
    assert "…" not in found.output  # no column is cut off


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "magic"), "method='magic' is not known; wanted one of "),
        (("--methods", "dense"), "names nothing but dense"),
        (("--methods", "svg2", "--densities", "2"), "Config.density"),
        (("--methods", "svg2", "--pbench", "nothing.json"), "nothing.json: cannot be read"),
    ],
)
def test_it_refuses_before_anything_runs(weights, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    found = run("compare", "--model", weights, *TINY, *arguments)
    assert found.exit_code == 2 and message in found.output and not list(tmp_path.iterdir())


def test_pbench_scores_are_numbers_by_method(tmp_path):
    path = tmp_path / "scores.json"
    for content in ("[1]", '{"svg2": "good"}', '{"svg2": NaN}', "{", '{"svg2": true}'):
        path.write_text(content)
        with pytest.raises(InputError, match="wanted a JSON object"):
            read_pbench(path)
    path.write_text('{"svg2": 1}')
    assert read_pbench(path) == {"svg2": 1.0} and read_pbench(None) is None


def test_columns_without_a_value_are_left_out_and_ours_stands_out():
    rows = [MeanRow(DENSE, density=1.0), MeanRow("anchored", density=0.2, psnr=30.0)]
    made = table("title", "method", [title(row.name) for row in rows], rows)
    assert made.columns == ("method", "PSNR, dB", "density")
    assert made.rows[0] == (title(DENSE), "-", "100.0%") and made.rows[1][1] == "30.00"


def test_a_disturbed_machine_is_told():
    assert disturbed([MeanRow("paper", waiting=MAX_WAITING)]) == []
    assert "as much as 50%" in disturbed([MeanRow("paper", waiting=0.5), MeanRow("svg2", waiting=None)])[0]


def test_bars_need_stages():
    parts = dict.fromkeys(PARTS, 0.1)
    assert runtime([MeanRow(DENSE), MeanRow("paper", parts=parts)]) == []
    (picture,) = runtime([MeanRow(DENSE, parts={"dense": 1.0}), MeanRow("paper", parts=parts)])
    assert picture.drawing.png.startswith(b"\x89PNG") and "attention pairs" in picture.drawing.svg


def test_every_method_once():
    assert chosen_methods(["dense", "svg2", "svg2", "paper"]) == ["svg2", "paper"]

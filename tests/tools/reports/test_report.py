"""The report of a study: complete, escaped, self-contained; and the commands that write it."""

import io
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("typer")

from rich.console import Console

from residua.tools.reports import figure
from residua.tools.reports.figure import INK
from residua.tools.reports.page import Finding, Page, Picture
from residua.tools.reports.table import Table
from tests.support.command import run

SHIPPED = Path(__file__).parents[2] / "data" / "captures" / "world"
HOSTILE = "<script>alert(1)</script>"


def test_a_flat_line_has_room_above_it():
    _, axes = figure.canvas(1)
    axes[0, 0].plot([0, 1], [0.4, 0.4001])
    figure._from_zero(axes[0, 0])
    low, high = axes[0, 0].get_ylim()
    assert low == 0 and high > 0.42


@pytest.fixture
def report() -> Page:
    table = Table("Errors", ("method", HOSTILE), ((HOSTILE, "0.1"), ("ours | x", "0.2")), "a note", "ours | x")
    drawing = figure.curves({HOSTILE: {"b": [(0.0, 1.0), (1.0, 2.0)]}}, "x", "y")
    return Page(
        title=f"A study {HOSTILE}",
        lead="lead",
        command="residua ablate x",
        tables=[table],
        pictures=[Picture("curve", HOSTILE, "caption", drawing)],
        findings=[Finding(HOSTILE, True, "e"), Finding("no", False, "e"), Finding("?", None, "e")],
        facts={"calls": HOSTILE},
        data={"value": float("nan"), "list": [1.0, float("inf")]},
    )


def test_a_report_is_four_kinds_of_files(report):
    files = report.files()
    assert set(files) == {"report.html", "report.md", "report.json", "curve.png"}
    assert files["curve.png"].startswith(b"\x89PNG")
    found = json.loads(files["report.json"])
    assert found["data"] == {"value": None, "list": [1.0, None]}
    assert [item["verdict"] for item in found["findings"]] == ["confirmed", "contradicted", "not measured"]


def test_the_page_escapes_everything_and_loads_nothing(report):
    page = report.html()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert "default-src 'none'" in page


def test_a_drawing_in_a_page_takes_the_colours_of_the_page(report):
    page = report.html()
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "var(--ink)" in svg and INK not in svg and "<?xml" not in page
    assert not re.search(r'<svg[^>]* width="', svg)  # as wide as its place


def test_ours_is_blue_and_nobody_else():
    chosen = figure.colours(["a", "ours", *map(str, range(20))], "ours")
    assert chosen.pop("ours") == figure.RESIDUA
    taken = {figure.RESIDUA, figure.CONTRADICTED, figure.CONFIRMED}
    assert not taken & set(chosen.values())
    svg = figure.curves({"m": {"a": [(0, 1)], "ours": [(0, 2)]}}, "x", "y", residua=["ours"]).svg
    assert "var(--blue)" in svg
    assert "var(--blue)" not in figure.curves({"m": {"a": [(0, 1)]}}, "x", "y").svg


def test_markdown_keeps_a_bar_inside_its_cell(report):
    text = report.markdown()
    assert "| **ours \\| x** | **0.2** |" in text and "![" in text and "residua ablate x" in text


def test_a_terminal_of_80_columns_shows_names_and_numbers_whole():
    columns = ("method", "radii off the dense path", "estimated error", *(f"metric {n}" for n in range(3)))
    row = ("dense again (the floor)", "0.041", "0.0158", *["145.09"] * 3)
    table = Table("many columns", columns, (row,))
    shown = io.StringIO()
    Console(file=shown, width=80).print(table.rich())
    assert "dense again (the floor)  " in shown.getvalue() and "…" not in shown.getvalue()
    fewer = io.StringIO()
    Console(file=fewer, width=80).print(table.rich(leave_out=("estimated error",)))
    assert "0.0158" not in fewer.getvalue() and "0.041" in fewer.getvalue()


def test_figures_are_the_same_for_the_same_numbers():
    groups = {"mean": {"m": {"a": 1.0, "b": 2.0}}}
    assert figure.bars(groups, "y", "a") == figure.bars(groups, "y", "a")


def test_the_scatter_takes_models_without_estimates_and_errors_of_zero():
    panels = {"a": {"m": [(0.1, 0.2), (0.01, 0.0)], "n": []}, "b": {"m": [], "n": []}}
    assert figure.estimate_scatter(panels, 1.5).png.startswith(b"\x89PNG")
    assert figure.estimate_scatter({"b": {"m": []}}, 1.5).png.startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["analyze", "ablate", "reconstructions"])
def test_a_command_writes_its_report(tmp_path, command):
    out = tmp_path / "out"
    result = run(command, SHIPPED, "--quick", "--backend", "torch", "--out", out)
    assert result.exit_code == 0, result.output
    names = {path.name for path in out.iterdir()}
    assert {"report.html", "report.md", "report.json"} <= names and any(name.endswith(".png") for name in names)
    found = json.loads((out / "report.json").read_text())
    assert found["tables"] and found["findings"] and found["command"].startswith(f"residua {command}")
    assert str(tmp_path) not in (out / "report.html").read_text()
    assert "report.html" in result.output

    again = run(command, SHIPPED, "--quick", "--out", out)
    assert again.exit_code == 2 and "--force" in again.output


@pytest.mark.parametrize("command", ["analyze", "ablate", "reconstructions"])
def test_what_is_no_capture_ends_with_a_message(tmp_path, command):
    (tmp_path / "empty").mkdir()
    for folder in ("gone", "empty"):
        result = run(command, tmp_path / folder, "--out", tmp_path / "out")
        assert result.exit_code == 2 and "error:" in result.output
    assert not (tmp_path / "out").exists()


def test_capture_refuses_numbers_that_are_none(tmp_path):
    pytest.importorskip("diffusers")
    result = run("capture", "--steps", "one", "--out", tmp_path / "c")
    assert result.exit_code == 2 and "whole numbers" in result.output

"""The report says what the rows say."""

import io
import json

import pyarrow.parquet as pq
import pytest

from residua.tools.evaluate.report import suite_report
from residua.tools.evaluate.store import SCHEMA
from residua.tools.evaluate.suite import Setting
from residua.tools.reports.figure import RESIDUA, colours

RUN = {"versions": {"residua": "1"}}


def rows_of(suite, psnr) -> list[dict]:
    """Done rows of every prompt, setting and seed; `psnr(prompt number, setting)`."""
    rows = []
    for number, prompt in enumerate(suite.prompts):
        for seed in suite.seeds:
            for setting in suite.settings:
                row = dict.fromkeys(SCHEMA.names)
                row.update(
                    id=f"{number} {seed} {setting.name}",
                    reference=f"{number} {seed} dense",
                    status="done",
                    prompt=prompt.text,
                    prompt_name="",
                    category="",
                    setting=setting.name,
                    seed=seed,
                    video=f"videos/{setting.name}/{number}-{seed}.mp4",
                    hardware="x",
                    waited=0.0,
                    seconds=8.0 if setting.is_dense else 2.0,
                    layers=[{"name": "a", "density": 0.2, "cost": 0.25, "error": 0.1 * (number + 1)}],
                )
                if not setting.is_dense:
                    row.update(psnr=psnr(number, setting.name) + seed, error=0.05, cost=0.25)
                rows.append(row)
    return rows


@pytest.fixture
def suite(make_suite):
    return make_suite([f"prompt {n} <i>" for n in range(12)], seeds=(0, 1))


def report(suite, rows, scores=None, runs=(RUN,)):
    files = suite_report(
        suite, rows, 72, scores or {}, {"vbench": "not here"}, {"runs": list(runs)}, "residua evaluate"
    )
    return files, json.loads(files["report.json"])


def lower(number: int, name: str) -> float:
    return 20.0 + number + (1.0 if name == "anchored" else 0.0)


def test_means_and_differences_are_those_of_the_rows(suite):
    files, found = report(suite, rows_of(suite, lower))
    paper = found["data"]["estimates"]["paper"]
    assert paper["psnr"]["mean"] == pytest.approx(26.0) and paper["psnr"]["median"] == pytest.approx(26.0)
    assert paper["psnr"]["low"] < 26.0 < paper["psnr"]["high"] and paper["psnr"]["prompts"] == 12
    assert paper["speedup"]["mean"] == 4.0
    difference = next(item for item in found["data"]["differences"] if item["metric"] == "psnr")
    assert difference["first"] == "anchored" and difference["mean"] == pytest.approx(1.0)
    table = next(table for table in found["tables"] if table["title"] == "Paired differences")
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["PSNR dB"].endswith("*") and not row["cost"].endswith("*")
    assert found["data"]["profiles"]["paper"]["error_per_layer"] == [[0.0, pytest.approx(0.65)]]
    assert "not here" in found["facts"]["not measured: vbench"] and found["warnings"] == []
    assert {"report.html", "report.md", "rows.parquet", "per-layer.png"} <= set(files)


def test_an_interval_stands_below_its_mean_on_the_page(suite):
    files, found = report(suite, rows_of(suite, lower))
    table = found["tables"][0]
    cell = dict(zip(table["columns"], table["rows"][-1], strict=True))["PSNR dB"]
    mean, _, interval = cell.partition(" ")
    assert f'{mean}<span class="interval">{interval}</span>' in files["report.html"].decode()
    speed = next(table for table in found["tables"] if table["title"] == "Speed")
    assert speed["rows"][-1][1:3] == ["2.00", "4.00x"]  # the same in every prompt: no interval


def test_residua_has_its_colour_and_other_methods_have_not(make_suite):
    given = {
        "dense": {},
        "balanced": {"quality": "balanced"},
        "low": {"density": 0.1},
        "paper": {"method": "paper"},
        "fitted": {"config": {"reconstruction": "probe"}},
        "svg2": {"method": "svg2"},
    }
    suite = make_suite(["a"], settings=tuple(Setting(*item) for item in given.items()))
    assert suite.own_settings == ["balanced", "low"]
    chosen = colours([setting.name for setting in suite.settings], *suite.own_settings)
    assert {name for name, colour in chosen.items() if colour == RESIDUA} == {"balanced", "low"}
    page = report(suite, rows_of(suite, lower))[0]["report.html"].decode()
    assert page.count("stroke: var(--blue)") > 0


def test_the_worst_ten_prompts_come_first_in_their_worst_seed(suite):
    files, found = report(suite, rows_of(suite, lower))
    worst = found["data"]["worst"]
    assert [item["prompt"] for item in worst] == [f"prompt {n} <i>" for n in range(10)]
    assert worst[0]["seed"] == 0
    assert [clip["setting"] for clip in worst[0]["clips"]] == ["dense", "anchored", "paper"]
    page = files["report.html"].decode()
    assert "<i>" not in page and "prompt 0 &lt;i&gt;" in page and 'src="../videos/paper/0-0.mp4"' in page


def test_failed_missing_and_mixed_rows_are_said_before_the_numbers(suite):
    rows = rows_of(suite, lower)
    rows[5].update(status="failed", reason="<b>boom</b>")
    rows[7].update(identical=True, psnr=None)
    rows[8].update(hardware="y")
    files, found = report(suite, rows[:-1], runs=(RUN, {"versions": {"residua": "2"}}))
    told = " ".join(found["warnings"])
    for words in (
        "1 of 72 rows are missing",
        "1 of 72 rows failed",
        "1 clip(s) are identical",
        "different versions",
        "different hardware",
    ):
        assert words in told
    assert found["data"]["failed"][0]["reason"] == "<b>boom</b>"
    assert "&lt;b&gt;boom" in files["report.html"].decode() and "<b>boom" not in files["report.html"].decode()


def test_a_prompt_that_failed_everywhere_is_one_line_with_all_its_logs(suite):
    rows = rows_of(suite, lower)
    for row in rows[:6]:  # the first prompt: two seeds, three settings
        row.update(status="failed", reason="a long reason")
    page = report(suite, rows)[0]["report.html"].decode()
    assert page.count("a long reason") == 1
    assert all(f'href="../logs/{row["id"]}.log">{row["setting"]}, {row["seed"]}</a>' in page for row in rows[:6])


def test_no_path_of_this_machine_is_published(make_suite):
    suite = make_suite(["a"], model="/home/somebody/models/tiny")
    files, _ = report(suite, rows_of(suite, lower))
    assert b"tiny: 1 prompt," in files["report.html"]
    assert b"/home/somebody" not in b"".join(files.values())


def test_a_difference_of_nothing_has_no_sign(suite):
    _, found = report(suite, rows_of(suite, lambda number, name: 20.0 + number))
    table = next(table for table in found["tables"] if table["title"] == "Paired differences")
    assert dict(zip(table["columns"], table["rows"][0], strict=True))["PSNR dB"] == "0.00"


def test_few_prompts_get_no_verdict(make_suite):
    small = make_suite(3, seeds=(0, 1))
    _, found = report(small, rows_of(small, lower))
    assert any("3 prompts" in text for text in found["warnings"])
    table = next(table for table in found["tables"] if table["title"] == "Paired differences")
    assert "*" not in "".join(table["rows"][0])


def test_scores_have_columns_in_tables_and_parquet(suite):
    rows = rows_of(suite, lower)
    scores = {row["id"]: {"vbench imaging_quality": 0.5} for row in rows if row["setting"] == "paper"}
    files, found = report(suite, rows, scores)
    assert "vbench imaging_quality" in found["tables"][0]["columns"]
    table = pq.read_table(io.BytesIO(files["rows.parquet"]))
    assert table.num_rows == 72 and table["vbench imaging_quality"].null_count == 48


def test_a_suite_of_which_nothing_is_done_has_a_report_too(suite):
    rows = [{**row, "status": "failed", "reason": "no"} for row in rows_of(suite, lower)]
    files, found = report(suite, rows)
    assert len(found["data"]["failed"]) == 72 and b"Failed rows" in files["report.html"]

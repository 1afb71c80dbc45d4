"""The study of the reconstructions: its numbers are the operator's, its verdicts follow from them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import residua
from residua import Config
from residua.method.rules import CPU
from residua.method.sizes import resolve
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.metrics.row_error import relative_row_error
from residua.tools.studies.reconstructions import (
    AS_IT_IS,
    COMPARED,
    COMPARISON,
    DENSITIES,
    INGREDIENTS,
    SAME_COST,
    WORSE,
    Bench,
    at,
    at_most,
    comparison_table,
    ingredient_tables,
    ingredients,
    measure,
    probed,
    reconstruction_findings,
    worse_calls,
    worse_tables,
)
from residua.tools.studies.subject import Subject
from residua.tools.synthetic import VideoLike, video_like
from tests.support.study_results import made

SHIPPED = Path(__file__).parents[2] / "data" / "captures" / "world"
CONFIG = Config(probes=24, backend="torch")


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """One call of 1,024 tokens, and one with text."""
    folder = tmp_path_factory.mktemp("capture")
    writer = CaptureWriter(folder, "synthetic")
    recipe = VideoLike(grid=(4, 16, 16), heads=1, head_dim=32)
    q, k, v = (x[0, 0] for x in video_like(recipe))
    writer.add(q, k, v, layer=0, head=0, step=0, branch="cond", grid=recipe.grid)
    text = [(1000, 1024)]
    writer.add(q, k, v, layer=1, head=0, step=0, branch="cond", text=text, text_queries=text)
    return read_captures(folder)


@pytest.fixture(scope="module")
def results(calls):
    return measure(calls, CONFIG)


def test_errors_are_those_of_the_operator_on_rows_it_has_not_probed(calls):
    for captured in calls:
        bench = Bench(Subject(captured, CONFIG))
        rows = torch.arange(captured.tokens)
        for reconstruction in COMPARED:
            config = CONFIG.replace(reconstruction=reconstruction)
            out, receipt = residua.attention(
                *captured.load(),
                config,
                scale=captured.scale,
                pinned_keys=captured.text,
                exact_queries=captured.text_queries,
                return_receipt=True,
            )
            errors = relative_row_error(out, bench.subject.dense)[0, 0]
            rows_probed = probed(receipt)
            assert len(rows_probed) == (0 if reconstruction == "none" else 24)
            assert not len(rows_probed) or float(errors[rows_probed].max()) < 1e-4
            text = torch.isin(rows, bench.subject.call.exact_queries.index(rows.device))
            found = bench.run(COMPARISON, reconstruction, config)
            assert found.mean == pytest.approx(float(errors[~torch.isin(rows, rows_probed) & ~text].mean()), rel=1e-5)
            assert (found.cost, found.estimate, found.density) == (receipt.cost, receipt.error, receipt.density)


def test_every_reconstruction_is_measured_at_every_density_and_every_ingredient_once(calls, results):
    settings = [item.setting for item in results if item.call == calls[0].name and item.table == COMPARISON]
    assert settings == [at(reconstruction, density) for density in DENSITIES for reconstruction in COMPARED]
    parts = [item.setting for item in results if item.call == calls[0].name and item.table == INGREDIENTS]
    assert len(parts) == len(set(parts)) == 12 and parts[0] == AS_IT_IS
    quick = measure(calls[:1], CONFIG, quick=True)
    assert {item.table for item in quick} == {COMPARISON, SAME_COST}


def test_simpler_methods_are_measured_at_the_same_cost_too(results):
    for item in results:
        if item.table == SAME_COST:
            density = float(item.setting.partition("@ ")[2])
            assert item.cost == pytest.approx(density, rel=0.02) or item.notes


def test_no_cost_is_above_its_target_unless_the_receipt_says_so(results):
    for item in results:
        charged = (
            item.cost if item.table == INGREDIENTS or not item.setting.startswith(("none", "probe")) else item.density
        )
        over = any("above the target" in note for note in item.notes)
        assert charged <= item.target + 1e-9 or over, (item.setting, charged)
    assert any(item.cost <= item.target for item in results if item.setting == at("anchored", 0.22))


def test_ingredients_change_one_thing_at_a_time(calls):
    call = calls[0].call()
    sizes = resolve(CONFIG, call, CPU)
    changed = ingredients(CONFIG.replace(reconstruction="probe"), sizes)
    base = changed[AS_IT_IS].to_dict()
    assert base["reconstruction"] == "anchored"
    for setting, config in changed.items():
        different = [name for name, value in config.to_dict().items() if value != base[name]]
        assert len(different) == (setting != AS_IT_IS), setting
    assert changed["without drift"].drift_rank == 0
    assert changed["half the query groups"].query_groups == sizes.query_groups // 2
    assert changed["twice the K/V groups"].kv_groups == 2 * sizes.kv_groups


def test_settings_that_a_call_cuts_to_the_same_run_once(calls):
    bench = Bench(Subject(calls[0], CONFIG))
    groups = bench.subject.sizes(CONFIG).kv_groups
    first, second = (bench.run(INGREDIENTS, "x", CONFIG.replace(summary_slots=slots)) for slots in (groups, 4 * groups))
    assert first == second and len(bench._done) == 1


def test_tables_show_errors_pairs_and_cost():
    runs = [
        made(reconstruction, 0.22, mean, model=model, density=0.1, cost=0.2)
        for model, factor in (("a", 1.0), ("b", 3.0))
        for reconstruction, mean in zip(COMPARED, (0.4 * factor, 0.3 * factor, 0.2 * factor, 0.1 * factor), strict=True)
    ]
    table = comparison_table(runs, 0.22)
    assert table.columns == ("reconstruction", "a", "b", "all calls", "exact pairs", "cost")
    assert table.rows[-1] == (
        COMPARED["anchored"],
        "0.1000 / 0.2000",
        "0.3000 / 0.6000",
        "0.2000 / 0.4000",
        "10.0 %",
        "20.0 %",
    )
    assert "not charged" in table.note and ingredient_tables(runs, 0.22) == []


def verdict(ours: float, paper: float, **wanted) -> str:
    runs = [made("anchored", 0.22, ours), made("probe", 0.22, paper)]
    return at_most(runs, at("anchored", 0.22), at("probe", 0.22), "claim", **wanted).verdict


def test_at_most_compares_means_by_a_factor_and_p99_as_it_is():
    assert verdict(0.04, 0.1, factor=0.4, p99=True) == "confirmed"
    assert verdict(0.05, 0.1, factor=0.4) == "contradicted"
    assert verdict(0.05, 0.1, factor=0.4, p99=True) == "mixed"  # p99 is lower, but the mean is not low enough
    assert verdict(0.1, 0.1) == "confirmed" and verdict(0.11, 0.1) == "contradicted"
    assert verdict(0.1, 0.1, tokens=4097) == "not measured"
    assert at_most([], "a", "b", "claim").verdict == "not measured"


def test_a_claim_is_mixed_if_one_model_breaks_it():
    runs = [
        made(reconstruction, 0.22, mean, model=model)
        for model, ours, paper in (("a", 0.1, 0.2), ("b", 0.4, 0.3))
        for reconstruction, mean in (("anchored", ours), ("probe", paper))
    ]
    found = at_most(runs, at("anchored", 0.22), at("probe", 0.22), "claim")
    assert found.verdict == "mixed" and "mean of b (0.4000 against 0.3000)" in found.evidence


def test_findings_hold_each_claim_to_its_own_densities_and_tokens():
    paper = made("probe", 0.22, 0.1)
    short = [
        paper,
        replace(paper, table=SAME_COST),
        *(made("anchored", density, mean) for density, mean in ((0.08, 0.3), (0.14, 0.1), (0.22, 0.03))),
    ]
    assert [item.verdict for item in reconstruction_findings(short)] == [
        "confirmed",
        "confirmed",
        "not measured",
        "confirmed",
    ]
    long = [replace(item, tokens=16_384) for item in short]
    assert [item.verdict for item in reconstruction_findings(long)][2] == "contradicted"


def test_calls_on_which_anchored_is_worse_are_listed_with_what_they_chose():
    note = "1 of 1 heads run without a tail"
    simpler = [
        made("probe", 0.08, 0.1),
        made("none", 0.08, 0.2),
        made("probe", 0.14, 0.2),
        made("none", 0.14, 0.1),
        made("probe", 0.22, 0.1, call="other"),
    ]
    runs = [
        *(replace(run, table=SAME_COST) for run in simpler),
        made("probe", 0.22, 0.1),  # not at the same cost
        made("anchored", 0.08, 0.25, chosen="without summary", notes=(note,), estimate=None),
        made("anchored", 0.14, 0.1 * WORSE),  # not by more than that
        made("anchored", 0.22, 0.3),  # no partner on the same call
    ]
    assert [(ours.target, ours.mean, other.mean) for ours, other in worse_calls(runs)] == [(0.08, 0.25, 0.1)]
    (table,) = worse_tables(runs)
    assert table.rows == (("m c", "8 %", "0.25", "-", "0.1", "probe", "without summary"),) and note in table.note
    found = reconstruction_findings(runs)[-1]
    assert found.holds is False and "1 of 2" in found.evidence and "it chose without summary" in found.evidence
    assert worse_tables([]) == [] and reconstruction_findings([])[-1].verdict == "not measured"


def test_the_shipped_capture_repeats_bit_for_bit():
    calls = read_captures(SHIPPED)[:1]
    before = torch.random.get_rng_state()
    first, second = (measure(calls, CONFIG, quick=True) for _ in range(2))
    assert first == second and torch.equal(before, torch.random.get_rng_state())

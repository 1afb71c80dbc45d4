"""The ablations compare like with like, and their SparsePR is the operator itself."""

from pathlib import Path

import pytest
import torch

import residua
from residua import Config
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.metrics.row_error import relative_row_error
from residua.tools.studies import ablations as ab
from residua.tools.studies.ablations import (
    Ablation,
    ablation_findings,
    ablation_tables,
    in_order,
    lattice,
    measure,
    unmatched,
)
from residua.tools.studies.study import Result, average, of
from residua.tools.studies.subject import Subject
from residua.tools.synthetic import VideoLike, video_like

SHIPPED = Path(__file__).parents[2] / "data" / "captures" / "world"
CONFIG = Config.paper(density=0.3, probes=24, query_groups=12, kv_groups=24, backend="torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two steps of one site, and one of another."""
    made = tmp_path_factory.mktemp("capture")
    writer = CaptureWriter(made, "synthetic")
    for layer, step in ((0, 0), (0, 1), (1, 0)):
        recipe = VideoLike(grid=(4, 8, 16), heads=1, head_dim=32, step=0.1 * step, seed=layer)
        q, k, v = (x[0, 0] for x in video_like(recipe))
        writer.add(q, k, v, layer=layer, head=0, step=step, branch="cond", grid=recipe.grid)
    return made


@pytest.fixture(scope="module")
def ablation(folder):
    return Ablation(Subject(read_captures(folder)[0], CONFIG))


@pytest.fixture(scope="module")
def results(folder):
    return measure(read_captures(folder), CONFIG)


def named(results, table):
    return {item.setting: item for item in results if item.table == table}


def test_sparsepr_of_the_tables_is_the_operator(ablation):
    subject = ablation.subject
    out, receipt = residua.attention(
        *subject.captured.load(), CONFIG, scale=subject.captured.scale, return_receipt=True
    )
    dense = torch.nn.functional.scaled_dot_product_attention(*subject.captured.load(), scale=subject.captured.scale)
    errors = relative_row_error(out, dense)[0, 0]
    probed = ablation.probes.rows.flatten()
    assert float(errors[probed].max()) < 1e-4
    errors[probed] = -1
    unprobed = errors[errors >= 0]
    found = named(ablation.density_sweep([0.3]), ab.DENSITY_TABLE)[f"{ab.SPARSEPR} @ 0.3"]
    assert found.mean == pytest.approx(float(unprobed.mean()), rel=1e-3)
    assert found.density == pytest.approx(receipt.density, abs=1e-6)


def test_hard_drop_of_the_tables_is_a_masked_softmax(ablation):
    found = named(ablation.partition_and_reconstruction(), ab.PARTITION_TABLE)
    subject = ablation.subject
    for setting, partition in ((ab.SEMANTIC, "semantic"), (ab.KEY_RESPONSE, "key-response"), (ab.RESPONSE, "response")):
        sparse = subject.sparse(CONFIG.replace(partition=partition))
        rows, keys = sparse.grouping.query.labels[0, 0], sparse.grouping.kv.labels[0, 0]
        kept = sparse.route.cells[0, 0][rows][:, keys]
        scores = subject.call.scale * subject.call.q[0, 0] @ subject.call.k[0, 0].mT
        out = scores.masked_fill(~kept, -torch.inf).softmax(-1) @ subject.call.v[0, 0]
        errors = relative_row_error(out, scores.softmax(-1) @ subject.call.v[0, 0])
        own = subject.probes(subject.group(CONFIG.replace(partition="semantic")), 24, "stratified")
        left = torch.ones(len(errors), dtype=torch.bool)
        left[torch.cat([own.rows.flatten(), ablation.probes.rows.flatten()])] = False
        assert found[setting].mean == pytest.approx(float(errors[left].mean()), rel=1e-4)
        assert found[setting].density == pytest.approx(float(kept.float().mean()), abs=1e-6)


def test_all_variants_of_a_table_route_as_many_pairs(results):
    smallest = 1 / 12 / 24  # a cell may not fit
    for table in (ab.PARTITION_TABLE, ab.PROBE_TABLE, ab.RANK_TABLE):
        for call in {item.call for item in results}:
            items = [item for item in results if item.table == table and item.call == call]
            probes = 24 / 512
            hard_dropped = (ab.SEMANTIC, ab.KEY_RESPONSE, ab.RESPONSE)
            routed = [item.density - probes * (item.setting not in hard_dropped) for item in items]
            assert max(routed) - min(routed) < 4 * smallest and max(routed) <= 0.3 - probes + 1e-9


def test_probes_are_fixed_where_they_are_not_compared(ablation, monkeypatch):
    used = []
    reconstruction = Subject.reconstruction

    def noted(self, sparse, probes, *rest):
        used.append(probes)
        return reconstruction(self, sparse, probes, *rest)

    monkeypatch.setattr(Subject, "reconstruction", noted)
    list(ablation.partition_and_reconstruction())
    assert used[0] is used[2] is ablation.probes and used[1] is not used[0]
    used.clear()
    list(ablation.iterations(ablation.centroids))
    assert len(used) == len(ab.COLD_STEPS) + len(ab.WARM_STEPS)
    assert all(probes is ablation.probes for probes in used)


def test_warm_starts_are_measured_on_calls_with_an_earlier_step(results):
    iterated = [item for item in results if item.table == ab.ITERATION_TABLE]
    assert {item.call for item in iterated} == {"L0 H0 S1 cond"}
    assert {item.setting for item in iterated} >= {"cold, 25", "warm, 2"}


@pytest.mark.parametrize(
    ("grid", "count"), [((4, 8, 8), 64), ((1, 64, 64), 64), ((32, 16, 16), 64), ((3, 5, 7), 11), ((2, 2, 2), 8)]
)
def test_a_lattice_is_spread_over_the_grid(grid, count):
    rows = lattice(grid, count)
    tokens = grid[0] * grid[1] * grid[2]
    assert len(rows) == count == len(rows.unique()) and 0 <= int(rows.min()) <= int(rows.max()) < tokens
    if count == 64:  # every column and every line of a big grid is not hit by the same few
        assert len((rows % grid[2]).unique()) >= 4 and len((rows // grid[2] % grid[1]).unique()) >= 4


def test_tables_average_over_calls_and_models():
    rows = [
        Result(ab.PARTITION_TABLE, setting, model, call, mean, 2 * mean, 0.2)
        for setting, factor in (
            (ab.SEMANTIC, 1.0),
            (ab.RESPONSE, 0.5),
            (ab.SEMANTIC_RECONSTRUCTED, 0.4),
            (ab.SPARSEPR, 0.3),
        )
        for model, call, mean in (("a", "1", factor), ("a", "2", 3 * factor), ("b", "1", 2 * factor))
    ]
    assert average(of(rows, ab.PARTITION_TABLE, ab.SEMANTIC, "a")) == pytest.approx((2.0, 4.0, 0.2))
    table = ablation_tables(rows)[0]
    assert table.columns == ("configuration", "a", "b", "all calls", "executed pairs")
    assert table.rows[1] == (ab.RESPONSE, "1.0000 / 2.0000", "1.0000 / 2.0000", "1.0000 / 2.0000", "20.0 %")
    verdicts = {item.claim: item.verdict for item in ablation_findings(rows)}
    assert verdicts["Response-coupled groups lower the hard-drop error"] == "confirmed"
    assert verdicts["Probe reconstruction is the larger gain of the two"] == "confirmed"
    assert verdicts["Stratified probes beat random ones"] == "not measured"


def test_a_claim_that_fails_for_one_model_is_mixed_and_for_all_contradicted():
    def rows(*pairs):
        return [
            Result(ab.PARTITION_TABLE, setting, model, "1", mean, mean, 0.2)
            for model, response, semantic in pairs
            for setting, mean in ((ab.RESPONSE, response), (ab.SEMANTIC, semantic), (ab.SEMANTIC_RECONSTRUCTED, 0.1))
        ]

    assert ablation_findings(rows(("a", 1.0, 2.0), ("b", 2.0, 1.0)))[0].verdict == "mixed"
    assert ablation_findings(rows(("a", 2.0, 1.0), ("b", 2.0, 1.0)))[0].verdict == "contradicted"


def test_the_shipped_capture_repeats_bit_for_bit():
    calls = in_order(read_captures(SHIPPED))[:1]
    config = Config.paper(probes=16, backend="torch")
    before = torch.random.get_rng_state()
    first, second = (measure(calls, config, quick=True) for _ in range(2))
    assert first == second and torch.equal(before, torch.random.get_rng_state())


def test_a_budget_that_minimum_cells_break_is_told(folder):
    tight = CONFIG.replace(density=0.1, probes=8)  # each of 12 query groups keeps one of 24 K/V groups
    results = measure(read_captures(folder)[:1], tight, quick=True)
    loose = measure(read_captures(folder)[:1], CONFIG, quick=True)
    assert unmatched(loose) == []
    if any(item.over > 0 for item in results):
        (warning,) = unmatched(results)
        assert "not matched in 1 of 1 calls" in warning
    made = Result(ab.PARTITION_TABLE, ab.SEMANTIC, "m", "c", 0.1, 0.2, 0.25, budget=0.2)
    assert made.over == pytest.approx(0.05) and "25.0 % of the pairs instead of 20.0 %" in unmatched([made])[0]

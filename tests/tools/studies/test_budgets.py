"""The study of budgets: heads are put back into the calls that they came from, shared budgets settle over the
steps, and the verdicts follow from the numbers."""

import pytest
import torch

import residua
from residua import Config
from residua.errors import InputError
from residua.tools.capture import CaptureWriter, read_captures
from residua.tools.studies.budgets import (
    FINER,
    PAPER,
    STEPS,
    HeadRun,
    SettingRun,
    budget_table,
    compare_budgets,
    findings,
    fixed,
    layers_of,
    measure,
    run,
    settings,
    shared,
)
from residua.tools.synthetic import CONCENTRATIONS, VideoLike, video_like

CONFIG = Config(probes=16, backend="torch", query_groups=8, kv_groups=24)
GRID = (4, 8, 8)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Two layers of two heads each, one layer broad and one concentrated, two steps."""
    folder = tmp_path_factory.mktemp("capture")
    writer = CaptureWriter(folder, "synthetic")
    for step in range(2):
        for layer, kind in enumerate(("broad", "sparse")):
            recipe = VideoLike(GRID, 2, 32, CONCENTRATIONS[kind], step=0.02 * step)
            q, k, v = video_like(recipe)
            for head in (1, 0):  # out of order
                one = [x[0, head] for x in (q, k, v)]
                writer.add(*one, layer=layer, head=head, step=step, branch="cond", grid=GRID)
    return read_captures(folder)


def test_heads_are_put_back_into_their_calls(calls):
    layers = layers_of(calls)
    assert [layer.name for layer in layers] == ["L0 cond", "L1 cond"]
    q, _, _ = layers[1].load(1)
    expected = video_like(VideoLike(GRID, 2, 32, CONCENTRATIONS["sparse"], step=0.02))[0]
    torch.testing.assert_close(q, expected, atol=1e-2, rtol=1e-2)  # captures are fp16
    torch.testing.assert_close(layers[1].load(7)[0], q)  # the last step is repeated
    dense = torch.nn.functional.scaled_dot_product_attention(*layers[1].load(1))
    torch.testing.assert_close(layers[1].dense, dense, atol=1e-5, rtol=1e-5)


def test_errors_are_those_of_whole_calls_at_the_last_step(calls):
    layers = layers_of(calls)
    config = CONFIG.replace(density=0.3)
    found = run(layers, "x", config)
    assert [head.head for head in found.heads] == ["L0 cond H0", "L0 cond H1", "L1 cond H0", "L1 cond H1"]
    state = residua.State()
    for step in range(STEPS):
        out, receipt = residua.attention(*layers[1].load(step), config, state, return_receipt=True)
    left = torch.ones(256, dtype=torch.bool)
    left[receipt.probe_rows[0, 1]] = False
    error = ((out - layers[1].dense).norm(dim=-1) / layers[1].dense.norm(dim=-1))[0, 1][left].mean()
    assert found.heads[3].mean == pytest.approx(float(error), rel=1e-4)
    assert found.heads[3].estimate == pytest.approx(float(receipt.error_per_head[0, 1]))
    assert found.cost == pytest.approx(sum(head.cost for head in found.heads) / 4)
    assert found.worst.mean == max(head.mean for head in found.heads)


def test_a_shared_budget_moves_pairs_to_where_they_count(calls):
    found = {item.setting: item for item in measure(calls, CONFIG, [0.3])}
    assert list(found) == [PAPER, FINER, fixed(0.3), shared(0.3)]
    spent = [head.cost for head in found[shared(0.3)].heads]
    even = [head.cost for head in found[fixed(0.3)].heads]
    assert max(spent) - min(spent) > 0.05 > max(even) - min(even)
    assert found[shared(0.3)].cost == pytest.approx(found[fixed(0.3)].cost, abs=0.02)


def test_settings_differ_in_what_they_say_alone():
    made = settings(CONFIG, [0.05])
    assert made[PAPER] == Config.paper(density=0.22, backend="torch")
    assert {config.rules for config in settings(CONFIG.replace(rules="gpu"), [0.05]).values()} == {"gpu"}
    assert made[FINER] == made[PAPER].replace(query_groups=300, kv_groups=1000)
    assert made[shared(0.05)] == made[fixed(0.05)].replace(balance=True) == CONFIG.replace(density=0.05, balance=True)


def test_other_heads_from_step_to_step_are_refused(tmp_path):
    writer = CaptureWriter(tmp_path / "capture", "synthetic")
    q, k, v = (x[0, 0] for x in video_like(VideoLike(GRID, 1, 32)))
    for head, step in ((0, 0), (1, 0), (0, 1)):
        writer.add(q, k, v, layer=0, head=head, step=step, branch="cond", grid=GRID)
    with pytest.raises(InputError, match="other heads from step to step"):
        layers_of(read_captures(tmp_path / "capture"))


def test_text_is_refused(tmp_path):
    writer = CaptureWriter(tmp_path / "capture", "synthetic")
    q, k, v = (x[0, 0] for x in video_like(VideoLike(GRID, 1, 32)))
    text = [(250, 256)]
    writer.add(q, k, v, layer=0, head=0, step=0, branch="cond", text=text, text_queries=text)
    with pytest.raises(InputError, match="there are text tokens"):
        layers_of(read_captures(tmp_path / "capture"))


def made(setting: str, mean: float, p99: float, cost: float = 0.05, estimate: float | None = 0.01) -> SettingRun:
    density = float(setting.split("@ ")[1]) if "@" in setting else 0.22
    head = HeadRun(setting, density, "L0 H0", 0.01, estimate, cost)
    return SettingRun(setting, density, "a", mean, p99, cost, (head,))


@pytest.mark.parametrize(
    ("mean", "p99", "verdict"), [(0.05, 0.4, "confirmed"), (0.06, 0.4, "contradicted"), (0.05, 0.41, "contradicted")]
)
def test_verdicts_follow_the_numbers(mean, p99, verdict):
    runs = [made(PAPER, 0.1, 0.4), made(fixed(0.05), 0.07, 0.5), made(shared(0.05), mean, p99)]
    found = {item.claim.split(":")[0]: item for item in findings(runs)}
    assert found["Shared, 5 % in all"].verdict == verdict
    assert found["Shared, 8 % in all"].verdict == "not measured"


@pytest.mark.parametrize(("cost", "holds"), [(0.05, True), (0.06, False)])
def test_sharing_must_not_cost_more(cost, holds):
    runs = [made(PAPER, 0.1, 0.4), made(fixed(0.05), 0.07, 0.5), made(shared(0.05), 0.05, 0.4, cost)]
    assert [item.holds for item in findings(runs) if "less mean error" in item.claim] == [holds]


@pytest.mark.parametrize(("estimate", "holds"), [(0.01, True), (0.02, False), (None, None)])
def test_estimates_are_compared_head_by_head(estimate, holds):
    runs = [made(setting, 0.1, 0.4, estimate=estimate) for setting in (PAPER, fixed(0.05), shared(0.05))]
    assert [item.holds for item in findings(runs) if "know their error" in item.claim] == [holds]


def test_the_report_says_that_short_calls_tell_nothing(calls):
    report = compare_budgets(calls, CONFIG, "residua budgets x", quick=True)
    assert {item.verdict for item in report.findings} == {"too short to tell"}
    table = budget_table([made(PAPER, 0.1, 0.4, estimate=None)], "a")
    assert table.rows == ((PAPER, "0.1000 / 0.4000", "0.0100 (L0 H0)", "5.0 %", "-", "-"),)

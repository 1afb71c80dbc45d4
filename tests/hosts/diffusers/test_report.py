"""The report: as data, as JSON, as a table."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

from residua import Config
from residua.hosts.log import PAIRS, CallLog, CallTimer, Tally
from residua.receipt import Note


@pytest.fixture
def report(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("hunyuan")
    handle = speed_up(model, scheduler=scheduler, dense_layers=1)
    denoise(model, inputs, scheduler)
    return handle.report()


def test_json_carries_everything(report):
    data = json.loads(report.to_json())
    [transformer] = data["transformers"]
    assert (transformer["family"], transformer["runs"], transformer["grids"]) == ("HunyuanVideo", 1, [[3, 8, 8]])
    first, second = transformer["layers"]
    assert first["dense"] == {"first steps": 2, "first layers": 6} and first["density"] is None
    assert second["dense"] == {"first steps": 2} and second["sparse"] == 6
    pairs = second["pairs"]
    assert pairs["total"] == sum(pairs[part] for part in ("routed", "probe", "pinned", "exact"))
    assert second["density"] == pairs["total"] / pairs["possible"]
    assert pairs["possible"] == 6 * 2 * 197 * 197  # calls, heads, queries and keys that are not padding
    assert second["sparse_seconds"] > 0 and second["dense_seconds"] > 0
    assert data["total"]["sparse"] == 6 and sum(data["total"]["dense"].values()) == 10


def test_the_table_shows_every_layer_and_reason(report):
    text = str(report)
    for part in ("transformer_blocks.0", "single_transformer", "first steps 2", "first layers 6", "grid 3x8x8"):
        assert part in text
    assert f"{report.total.density:.4f}" in text
    assert f"{report.total.cost:.4f}" in text
    assert f"{report.total.error:.1e}" in text
    assert "6 sparse (4 warm, of which" in text and "10 dense" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_cost_is_the_pairs_and_all_that_was_done_beside_them(report):
    layer, total = report.transformers[0].layers[1], report.total
    spent = layer.pairs["total"] + sum(layer.beside.values())
    assert layer.cost == spent / layer.pairs["possible"] > layer.density
    assert layer.beside["routing"] > 0 and layer.beside["judging"] > 0
    assert (total.cost, total.beside) == (layer.cost, layer.beside)
    assert report.transformers[0].layers[0].cost is None


def test_heads_are_counted_by_what_they_chose(report):
    layer = report.transformers[0].layers[1]
    assert sum(layer.chosen.values()) == 6 * 2  # calls, heads
    assert layer.dense_heads == layer.chosen["dense"] == 0
    assert report.total.chosen == layer.chosen
    [most] = layer.chosen.keys() - {choice for choice, heads in layer.chosen.items() if heads < 7}
    assert f"{most} {layer.chosen[most]}" in str(report)


def test_heads_that_ran_dense_because_of_max_error(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    bounded = Config(query_groups=8, kv_groups=24, probes=6, kmeans_cold=4, max_error=1e-6)
    handle = speed_up(model, 0.4, config=bounded, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    report = handle.report()
    assert report.total.dense_heads == sum(report.total.chosen.values()) == 12 * 2
    assert report.total.error == 0.0 and report.total.cost > 1.0  # they were probed before
    text = str(report)
    assert "max_error 1e-06, density at most 0.4" in text
    assert "max_error 12" in text and "dense because of max_error 24" in text
    assert max(map(len, text.splitlines())) <= 80
    assert next(note for note in report.total.notes if "ran dense" in note).startswith("... of 2 heads")


def test_reconstructions_without_a_choice(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, config=Config.paper(probes=6, kmeans_cold=4), scheduler=scheduler)
    denoise(model, inputs, scheduler)
    total = handle.report().total
    assert (total.chosen, total.dense_heads, list(total.beside)) == ({}, 0, ["routing"])
    assert "heads over all" not in str(handle.report())


def test_no_receipt_is_read_before_it_is_asked_for(tiny, scheduler, denoise, speed_up, monkeypatch):
    """Reading one makes a GPU wait: not during the calls."""
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler)
    read = []
    monkeypatch.setattr(CallLog, "read_receipts", lambda log: read.append(len(log.tallies)) or [])
    denoise(model, inputs, scheduler)
    assert read == []
    tallies = [tally for tally in handle.attachments[0].host.log.tallies.values() if tally.sparse]
    assert len(tallies) == 12  # layers, branches, sparse steps
    assert all(len(tally._receipts) == 1 and not tally.pairs and not tally.beside for tally in tallies)


def test_rich_prints_the_same_table(report):
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    assert "first layers 6" in console.export_text()


def test_an_empty_report(tiny, scheduler, speed_up):
    model, _ = tiny.build("wan")
    text = str(speed_up(model, scheduler=scheduler).report())
    assert "none yet" in text


def test_clear_starts_counting_again(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    handle.clear()
    total = handle.report().total
    assert (total.sparse, total.dense, total.pairs, total.seconds) == (0, {}, {}, 0.0)
    denoise(model, inputs, scheduler)
    assert (handle.report().total.sparse, handle.report().transformers[0].runs) == (12, 1)


def test_reset_starts_cold(tiny, scheduler, denoise, one_pass, speed_up):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler)
    denoise(model, inputs, scheduler)
    handle.reset()
    assert not handle.attachments[0].host.warm


def test_density_with_dense_calls(report):
    total = report.total
    dense = total.dense_pairs
    wanted = (total.pairs["total"] + dense) / (total.pairs["possible"] + dense)
    assert total.density_with_dense == wanted > total.density


def test_the_timer_adds_up_host_time():
    timer = CallTimer()
    with timer.running(torch.device("cpu")):
        sum(range(1000))
    assert timer.seconds() > 0


def test_the_timer_reads_cuda_events_late(monkeypatch):
    """With stand-ins for the events: recorded during the call, read only when asked."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = CallTimer()
    for _ in range(2):
        with timer.running(torch.device("cuda")):
            pass
    assert log == ["record"] * 4
    assert timer.seconds() == timer.seconds() == 0.5
    assert log == ["record"] * 4 + ["wait"] * 2


def test_not_finite_tensors_are_noted_and_the_json_stays_valid(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler)
    inputs["hidden_states"][0, 0, 0, 0, 0] = float("nan")
    assert not torch.isfinite(denoise(model, inputs, scheduler)).all()
    report = handle.report()
    assert any("not finite" in note for note in report.total.notes)
    json.loads(report.to_json(), parse_constant=pytest.fail)


def test_equal_notes_are_counted_together():
    log = Tally()
    for density in (0.2345, 0.3456):
        receipt = SimpleNamespace(
            warm=False,
            reused=0.0,
            pairs=SimpleNamespace(**dict.fromkeys(PAIRS, 1)),
            backend="torch",
            error=0.1,
            flops=1,
            timings=None,
            beside={"routing": torch.ones(1, 2)},
            chosen={"without summary": 2},
            notes=(
                Note("density {} is above the target 0.22", density),
                Note("{} of 4 heads run", round(10 * density)),
                Note("the estimated error {} is large", f"{density:.2f}"),
            ),
        )
        log._receipts.append(receipt)
    log.read_receipts()
    assert log.notes == {
        "density ... is above the target 0.22": 2,
        "... of 4 heads run": 2,
        "the estimated error ... is large": 2,
    }
    assert log.beside == {"routing": 4.0} and log.chosen == {"without summary": 4}


def test_profile_adds_the_time_of_every_stage(tiny, scheduler, denoise, speed_up):
    model, inputs = tiny.build("wan")
    handle = speed_up(model, scheduler=scheduler, time_stages=True)
    denoise(model, inputs, scheduler)
    total = handle.report().total
    assert {"grouping", "routing", "summary", "probes", "attention", "reconstruction"} <= set(total.stages)
    assert 0 < sum(total.stages.values()) < total.sparse_seconds
    assert "routing" in str(handle.report()) and total.flops > 0


def test_without_profile_no_stage_is_timed(report):
    assert report.total.stages == {} and report.total.flops > 0

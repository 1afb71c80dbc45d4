"""The benchmark: what it reports adds up, and it reports nothing when the outputs are wrong."""

import json
from dataclasses import replace

import pytest
import torch

from residua.errors import BackendError, InputError
from residua.ops.backend import TorchBackend
from residua.tools.bench import sweep
from residua.tools.bench.attention import CallCase, CallTimes, measure
from residua.tools.bench.memory import peak_extra_bytes
from tests.support.command import run

SMALL = CallCase(tokens=512, heads=2, head_dim=32, backend="torch", repeats=2)


@pytest.fixture(scope="module")
def row() -> CallTimes:
    return measure(SMALL)


def test_the_figures_agree_with_each_other(row):
    found = row.to_dict()
    assert found["limit"] == pytest.approx(1 / 0.22)
    assert found["speedup"] == pytest.approx(row.dense_ms / row.call_ms)
    assert found["run_speedup"] == pytest.approx(8 * row.dense_ms / (7 * row.call_ms + row.regroup_ms))
    assert found["kernel_ms"] == row.stages_ms["attention"]
    assert found["kernel_over_limit"] == pytest.approx(row.kernel_ms / (row.kernel_density * row.dense_ms))
    assert row.kernel_density < row.cost and row.density <= row.cost <= 0.22
    assert 0 < row.mean_error < row.p99_error
    assert row.tensor_bytes == 4 * 2 * 512 * 32 * 4
    json.dumps(found)


def test_every_stage_of_a_call_is_timed(row):
    assert list(row.stages_ms) == [
        "budget",
        "grouping",
        "routing",
        "summary",
        "probes",
        "attention",
        "reconstruction",
        "exact rows",
    ]
    assert all(value >= 0 for value in row.stages_ms.values())


def test_a_wrong_kernel_is_not_reported(monkeypatch):
    right = TorchBackend.attend

    def wrong(self, *args, **options):
        out, lse = right(self, *args, **options)
        return out * 1.001, lse

    monkeypatch.setattr(TorchBackend, "attend", wrong)
    with pytest.raises(BackendError, match="differ from fp64"):
        measure(SMALL)


def test_an_output_without_numbers_is_not_reported(monkeypatch):
    monkeypatch.setattr(TorchBackend, "add_affine", lambda self, out, *rest: torch.full_like(out, torch.nan))
    with pytest.raises(BackendError, match="nothing is reported"):
        measure(replace(SMALL, reconstruction="probe"))


@pytest.mark.parametrize("change", [{"dtype": "int8"}, {"concentration": "wide"}, {"tokens": 0}])
def test_a_task_that_makes_no_sense_is_refused(change):
    with pytest.raises(InputError, match=next(iter(change))):
        CallCase(**change)


def test_the_peak_of_a_piece_of_work_is_seen():
    kept = []
    extra = peak_extra_bytes(lambda: kept.append(torch.ones(8 << 20)))  # 32 MiB
    if extra is None:
        pytest.skip("this system does not tell its peak memory")
    assert 24 << 20 < extra < 256 << 20


def test_a_sweep_covers_every_pair_and_is_drawn(row, tmp_path):
    pytest.importorskip("matplotlib")
    todo = sweep.tasks(SMALL, [256, 512], [0.2, 0.4])
    assert [(task.tokens, task.density) for task in todo] == [(256, 0.2), (512, 0.2), (256, 0.4), (512, 0.4)]
    rows = [replace(row, task=replace(row.task, tokens=n)) for n in (256, 512)]
    sweep.write_drawings(sweep.drawings(rows), tmp_path / "deep")
    assert (tmp_path / "deep" / "stages.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "deep" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_json_and_never_over_it(tmp_path):
    target = tmp_path / "out.json"
    command = ["bench", "attention", "--tokens", "256", "--heads", "1", "--head-dim", "16", "--repeats", "1"]
    command += ["--backend", "torch", "--json", str(target)]
    assert run(*command).exit_code == 0
    before = target.read_text()
    assert json.loads(before)["task"]["tokens"] == 256
    assert run(*command).exit_code == 2
    assert target.read_text() == before
    assert run(*command, "--force").exit_code == 0

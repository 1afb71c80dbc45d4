"""The logic of `residua bench gpu`, on small calls and the CPU."""

import json
import math
from dataclasses import replace

import pytest
import torch

import residua
from residua.errors import BackendError, InputError
from residua.method.inputs import validate
from residua.ops.backend import TorchBackend
from residua.tools.bench import gpu
from residua.tools.bench.case import milliseconds

CPU = torch.device("cpu")
SMALL = gpu.GpuCase(tokens=256, heads=5, head_dim=32, dtype="fp32", density=0.9, repeats=2)


@pytest.fixture(scope="module")
def report():
    return gpu.measure(SMALL, CPU)


def test_without_a_gpu_it_refuses_and_names_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"sees no CUDA device.*residua bench attention"):
        gpu.require_gpu()


def test_the_report_is_whole(report):
    assert json.loads(json.dumps(report)) == report
    assert report["task"]["tokens"] == 256
    assert report["environment"]["device"] == "cpu"
    assert report["dense_ms"]["SDPA"] > 0
    found = report["backends"]["torch"]
    assert found["kernel_error"] < 1e-5
    assert found["bit_identical"]
    assert found["call_ms"] > 0
    assert found["cold_ms"] > 0
    grouping = {"project", "lloyd", "group_means", "gather_rows", "cell_mass"}
    summary = {"slot_summary", "skipped_covariance", "attend, with a summary"}
    assert set(found["primitives_ms"]) == grouping | summary | {"attend", "attend_rows", "add_affine"}
    assert {"grouping", "routing", "attention", "probes", "reconstruction"} <= set(found["stages_ms"])
    assert 0 < found["routed_density"] < found["density"] <= 0.901
    assert 0 < found["mean_error"] <= found["p99_error"]
    assert found["peak_extra_bytes"] is None
    assert report["backends"]["reference"]["reasons"]


def test_backends_that_cannot_say_why(report):
    for found in report["backends"].values():
        assert "call_ms" in found or all(found["reasons"])


def test_a_wrong_kernel_gets_no_times(monkeypatch):
    attend = TorchBackend.attend

    def wrong(self, *arguments, **options):
        out, lse = attend(self, *arguments, **options)
        return out * 1.01, lse

    monkeypatch.setattr(TorchBackend, "attend", wrong)
    call = validate(*SMALL.tensors(CPU))
    found = gpu.measure_backend(SMALL, call, TorchBackend(), call.v, lambda _: None)
    assert set(found) == {"wrong"}
    assert "no times are reported" in found["wrong"]


@pytest.mark.parametrize("what", ["summary", "drift", "calls"])
def test_what_is_wrong_only_in_what_is_timed_gets_no_times(monkeypatch, what):
    """A kernel that is right without a summary may be wrong with one, and a call where its kernel is not."""
    attend = TorchBackend.attend

    def wrong(self, q, k, v, route, scale, summary=None, out_dtype=None):
        if summary is not None and what == "summary":
            summary = replace(summary, values=summary.values * 1.5)
        if summary is not None and summary.drift is not None and what == "drift":
            summary = replace(summary, drift=None)
        return attend(self, q, k, v, route, scale, summary, out_dtype)

    monkeypatch.setattr(TorchBackend, "attend", wrong)
    if what == "calls":
        monkeypatch.setattr("residua.tools.bench.gpu.attention", lambda *a, **k: spoiled(*a, **k))
    task = replace(SMALL, tokens=512, density=0.3)  # enough for a drift
    call = validate(*task.tensors(CPU))
    dense = torch.nn.functional.scaled_dot_product_attention(call.q, call.k, call.v)
    found = gpu.measure_backend(task, call, TorchBackend(), dense, lambda _: None)
    assert set(found) == {"wrong"}


def spoiled(*arguments, **options):
    found = residua.attention(*arguments, **options)
    return (-found[0], found[1]) if isinstance(found, tuple) else -found


def test_a_dense_kernel_that_refuses_is_reported():
    def refuse():
        raise RuntimeError("No available kernel.\nand more")

    assert gpu._try_dense(refuse, 2, CPU) == ("refused: No available kernel.", None)
    assert gpu._try_dense("not installed", 2, CPU) == ("not installed", None)


def test_the_tables(report):
    dense, sparse = gpu.tables(report)
    assert len(dense.rows) == len(report["dense_ms"])
    assert len(sparse.rows) == len(report["backends"])
    unmeasured = {**report, "dense_ms": {"SDPA": "refused: no"}}
    assert gpu.tables(unmeasured)[0].rows == (("SDPA", "refused: no"),)


def test_heads_differ_although_they_are_made_in_parts():
    call = validate(*SMALL.tensors(CPU))
    assert call.q.shape == (1, 5, 256, 32)
    assert not torch.equal(call.q[:, 0], call.q[:, 4])


@pytest.mark.parametrize("wrong", [{"dtype": "fp8"}, {"tokens": 0}, {"concentration": "none"}])
def test_bad_tasks_are_refused(wrong):
    with pytest.raises(InputError):
        gpu.GpuCase(**wrong)


def test_the_median_is_reported(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 29.0])
    monkeypatch.setattr("residua.tools.bench.case._now", lambda device: next(clock))
    assert math.isclose(milliseconds(lambda: None, 3, CPU), 2000.0)

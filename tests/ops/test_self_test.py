"""The self-test of a backend, and what follows from it; on the CPU, with backends that compute wrongly."""

import json
from functools import partial
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from residua.errors import BackendError
from residua.ops import gpu_cache, self_test
from residua.ops.backend import BACKENDS, PRIMITIVES, Demand, TorchBackend
from residua.ops.select import choose_backend
from residua.ops.triton import TritonBackend
from residua.tools import doctor
from residua.tools.cli.app import app

CPU = torch.device("cpu")
SHAPE = ((2, 1, 65, 90, 32),)


class Wrong(TorchBackend):
    name = "wrong"

    def attend(self, *arguments, **options):
        out, lse = super().attend(*arguments, **options)
        return out * 1.1, lse


class WrongSlots(TorchBackend):
    """Right in everything but one of the small stages."""

    name = "wrong slots"

    def choose_slots(self, *arguments):
        index, mass, share = super().choose_slots(*arguments)
        return index, mass, share * 1.01


class Raising(TorchBackend):
    name = "raising"

    def cell_mass(self, *arguments):
        raise RuntimeError("an illegal memory access was encountered\nand more")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path))
    monkeypatch.delenv("RESIDUA_SELF_TEST", raising=False)
    monkeypatch.setattr(self_test, "_VERDICTS", {})
    return tmp_path


def test_a_sound_backend_passes():
    checks = self_test.run_self_test(TorchBackend(), CPU, SHAPE)
    assert len(checks) == 2 * 29
    overridden = {name for name in PRIMITIVES if name in vars(TritonBackend)}
    assert overridden <= {check.kernel.partition(",")[0] for check in checks}
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]
    assert self_test.record(TorchBackend(), CPU, checks) is None


def test_a_wrong_kernel_fails_and_the_others_do_not():
    checks = self_test.run_self_test(Wrong(), CPU, SHAPE, (torch.bfloat16,))
    failed = {check.kernel for check in checks if not check.passed}
    assert failed == {"attend", "attend, summary", "attend, drift"}


def test_a_wrong_stage_fails_alone():
    checks = self_test.run_self_test(WrongSlots(), CPU, SHAPE, (torch.bfloat16,))
    assert {check.kernel for check in checks if not check.passed} == {"choose_slots"}


def test_a_kernel_that_raises_is_a_verdict_not_an_error():
    checks = self_test.run_self_test(Raising(), CPU, SHAPE, (torch.float16,))
    (bad,) = [check for check in checks if not check.passed]
    assert bad.kernel == "cell_mass"
    assert bad.problem == "an illegal memory access was encountered"


def test_the_verdict_is_kept_and_can_be_reversed(cache):
    reason = self_test.record(Wrong(), CPU, self_test.run_self_test(Wrong(), CPU, SHAPE, (torch.bfloat16,)))
    assert "failed its self-test" in reason
    assert "attend (bfloat16" in reason
    assert self_test.first_use(Wrong(), CPU) == reason
    assert json.loads((cache / "gpus.json").read_text())
    assert self_test.record(Wrong(), CPU, self_test.run_self_test(TorchBackend(), CPU, SHAPE)) is None
    assert self_test.first_use(Wrong(), CPU) is None


def test_first_use_runs_once_per_gpu_and_version(monkeypatch):
    runs = mock.Mock(return_value=[])
    monkeypatch.setattr(self_test, "run_self_test", runs)
    assert self_test.first_use(TorchBackend(), CPU) is None
    assert self_test.first_use(TorchBackend(), CPU) is None
    assert runs.call_count == 1
    monkeypatch.setattr(gpu_cache, "gpu_key", lambda device: "another GPU")
    monkeypatch.setattr(self_test, "gpu_key", lambda device: "another GPU")
    self_test.first_use(TorchBackend(), CPU)
    assert runs.call_count == 2
    monkeypatch.setenv("RESIDUA_SELF_TEST", "0")
    monkeypatch.setattr(gpu_cache, "gpu_key", lambda device: "a third GPU")
    self_test.first_use(TorchBackend(), CPU)
    assert runs.call_count == 2


def test_a_verdict_outlives_a_cache_that_cannot_be_written(monkeypatch):
    """A home directory that is read-only must not bring a backend back that has failed."""
    monkeypatch.setattr(gpu_cache, "write_text_whole", mock.Mock(side_effect=OSError("read-only")))
    monkeypatch.setattr(self_test, "SMALLEST", SHAPE)
    reason = self_test.first_use(Wrong(), CPU)
    assert "failed its self-test" in reason
    assert self_test.first_use(Wrong(), CPU) == reason


def test_settings_of_the_caller_do_not_change_the_verdict():
    """First use may be inside of anything, and a verdict is kept for good."""
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        checks = self_test.run_self_test(TorchBackend(), CPU, SHAPE, (torch.bfloat16,))
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]


def test_a_lack_of_memory_is_no_verdict(monkeypatch, cache):
    monkeypatch.setattr(self_test, "SMALLEST", SHAPE)
    crowded = TorchBackend()
    monkeypatch.setattr(
        crowded, "attend_rows", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")), raising=False
    )
    assert self_test.first_use(crowded, CPU) is None
    assert not (cache / "gpus.json").exists()
    assert "failed its self-test" in self_test.first_use(Wrong(), CPU)
    assert self_test.first_use(TorchBackend(), CPU) is None  # tested again, with memory
    assert gpu_cache.recall(CPU)["passed"] == ["torch"]


def test_a_device_that_a_kernel_has_broken_is_a_verdict(monkeypatch):
    """After an illegal access every operation raises, also those between two checks."""
    monkeypatch.setattr(self_test, "_labels", mock.Mock(side_effect=RuntimeError("CUDA error: illegal access")))
    checks = self_test.run_self_test(TorchBackend(), CPU, SHAPE, (torch.bfloat16,))
    assert {check.problem for check in checks} == {"CUDA error: illegal access"}
    assert "illegal access" in self_test.record(TorchBackend(), CPU, checks)


def test_nothing_is_tested_while_a_graph_is_captured(monkeypatch):
    runs = mock.Mock(return_value=[])
    monkeypatch.setattr(self_test, "run_self_test", runs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023
        assert self_test.first_use(TorchBackend(), torch.device("cuda")) is None
        assert runs.call_count == (0 if capturing else 1)


def test_the_cache_is_read_when_it_has_changed(cache, monkeypatch):
    gpu_cache.remember(CPU, passed=["torch"])
    assert gpu_cache.recall(CPU) == {"passed": ["torch"]}
    with mock.patch.object(gpu_cache.json, "loads", side_effect=AssertionError("read again")):
        assert gpu_cache.recall(CPU) == {"passed": ["torch"]}
    (cache / "gpus.json").write_text(json.dumps({gpu_cache.gpu_key(CPU): {"passed": ["native", "torch"]}}))
    assert gpu_cache.recall(CPU) == {"passed": ["native", "torch"]}


def test_an_amd_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(TritonBackend, "unavailable", lambda self: None)  # as if Triton were installed
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = TritonBackend().reasons(Demand(torch.device("cuda"), torch.bfloat16, 128, 128))
    assert "an AMD GPU" in reason


@pytest.mark.parametrize(("backend", "passes"), [(TorchBackend, True), (Wrong, False), (Raising, False)])
def test_the_command_prints_a_verdict_per_kernel(monkeypatch, backend, passes):
    """`residua doctor --self-test` as on a GPU, with a backend of the CPU in its place."""
    found = backend()
    monkeypatch.setattr(found, "gpu_by_itself", True, raising=False)
    monkeypatch.setattr(doctor, "backends", lambda: {found.name: found})
    monkeypatch.setattr(doctor, "self_test", partial(doctor.self_test, CPU))
    monkeypatch.setattr(doctor, "run_self_test", partial(self_test.run_self_test, shapes=SHAPE))
    monkeypatch.setattr(doctor, "_timed", lambda name, device: f"{name} beside SDPA")
    shown = CliRunner().invoke(app, ["doctor", "--self-test", "--json"])
    assert shown.exit_code == (0 if passes else 1)
    (row,) = json.loads(shown.stdout)
    assert row["backend"] == found.name
    assert len(row["checks"]) == 2 * 29
    assert all(check["passed"] for check in row["checks"]) == passes
    if passes:
        assert row["verdict"] == "torch beside SDPA"
    else:
        assert "failed its self-test on this GPU" in row["verdict"]
        assert self_test.first_use(found, CPU) == row["reason"]  # kept: it is not chosen
    shown = CliRunner().invoke(app, ["doctor", "--self-test"], env={"COLUMNS": "200"})
    assert ("FAILED" in shown.stdout) != passes


def test_a_backend_that_failed_is_not_chosen(monkeypatch):
    """On a GPU that exists only in this test."""
    pytest.importorskip("triton", reason="Triton is not installed")
    cuda, failed = torch.device("cuda"), "failed its self-test on this GPU: attend"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("residua.ops.flashinfer.missing_flashinfer", lambda: "not here")
    demand = Demand(cuda, torch.bfloat16, 128, 128)
    gpu_cache.remember(cuda, passed=["triton"], failed={})
    assert choose_backend("auto", demand).name == "triton"
    gpu_cache.remember(cuda, passed=[], failed={"triton": failed})
    assert TritonBackend().reasons(demand) == [failed]
    with pytest.raises(BackendError, match="failed its self-test"):
        choose_backend("auto", demand)
    assert choose_backend("torch", demand).name == "torch"


def test_an_old_gpu_is_told_so_and_gets_no_slow_backend(monkeypatch):
    monkeypatch.setattr(TritonBackend, "unavailable", lambda self: None)  # as if Triton were installed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")
    with pytest.raises(BackendError, match=r"sm_75: takes sm_80 and newer(.|\n)*torch: slower on a GPU"):
        choose_backend("auto", Demand(torch.device("cuda"), torch.float16, 128, 128))


def test_auto_follows_what_was_measured(monkeypatch):
    class Other(TorchBackend):
        name, preference, gpu_by_itself = "other", 5, True

    class Another(TorchBackend):
        name, preference, gpu_by_itself = "another", 4, True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    demand = Demand(torch.device("cuda"), torch.float64, 128, 128)
    known = {"other": Other(), "another": Another()}
    with mock.patch("residua.ops.select.backends", lambda: known):
        assert choose_backend("auto", demand).name == "other"
        gpu_cache.remember(torch.device("cuda"), order=["another", "other"])
        assert choose_backend("auto", demand).name == "another"
    assert "other" not in dict(BACKENDS)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", '{"cpu": 3}', "null", "[" * 100_000])
def test_a_broken_cache_is_no_cache(cache, content):
    (cache / "gpus.json").write_text(content)
    assert gpu_cache.recall(CPU) == {}
    gpu_cache.remember(CPU, passed=["torch"])
    assert gpu_cache.recall(CPU) == {"passed": ["torch"]}


def test_facts_of_another_kind_are_no_facts(cache):
    (cache / "gpus.json").write_text(
        json.dumps({gpu_cache.gpu_key(CPU): {"failed": None, "passed": "all", "order": ["a"], "more": 1}})
    )
    assert gpu_cache.recall(CPU) == {"order": ["a"]}


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    for name in ("RESIDUA_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError("no such user")))
    monkeypatch.setattr("pathlib.Path.mkdir", mock.Mock(side_effect=PermissionError))
    assert gpu_cache.recall(CPU) == {}
    gpu_cache.remember(CPU, passed=["torch"])

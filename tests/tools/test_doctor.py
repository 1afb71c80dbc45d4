"""`residua doctor`: versions, CPU features and backends, each with the reason where it cannot run."""

import importlib.metadata
import json

import torch

import residua
from residua.ops import backend as backend_module
from residua.ops import backend as backends
from residua.tools import doctor


def test_versions_are_the_installed_ones_and_missing_is_none(monkeypatch):
    found = doctor.versions()
    assert found["residua"] == residua.__version__
    assert found["torch"] == importlib.metadata.version("torch")
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package-at-all",))
    assert doctor.versions()["no-such-package-at-all"] is None


def test_the_report_is_plain_and_complete():
    report = json.loads(json.dumps(doctor.report()))
    assert set(report) == {"versions", "cpu", "gpus", "backends"}
    assert report["cpu"]["threads"] == torch.get_num_threads() and report["cpu"]["model"]
    states = {state["name"]: state for state in report["backends"]}
    assert states["torch"]["reason"] is None and states["torch"]["automatic"]
    assert states["reference"]["reason"] is None and not states["reference"]["automatic"]
    assert all(state["summary"] for state in states.values())


def test_cpu_features_come_from_what_the_kernels_can_use():
    assert set(doctor.cpu()["features"]) <= set(doctor.CPU_FLAGS)


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    class Missing(backend_module.TorchBackend):
        name = "missing"
        about = "a backend without its compiler"

        def unavailable(self):
            return "no compiler; install one"

    monkeypatch.setitem(backends.BACKENDS.data, "missing", Missing())
    (state,) = [s for s in doctor.backend_states() if s["name"] == "missing"]
    assert state["reason"] == "no compiler; install one"


def test_hints_in_brackets_are_printed_as_they_are(monkeypatch):
    """rich takes [gpu] for a style and would swallow it."""
    from typer.testing import CliRunner

    from residua.tools.cli.app import app

    facts = doctor.report()
    facts["backends"][0]["reason"] = "pip install 'residua[gpu]'"
    monkeypatch.setattr(doctor, "report", lambda: facts)
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert "residua[gpu]" in shown.stdout

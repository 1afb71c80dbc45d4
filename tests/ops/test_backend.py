"""Choosing a backend: with reasons, one error that lists them all, and never another one in silence."""

from contextlib import nullcontext

import pytest
import torch

import residua
from residua import BackendError, Config
from residua.api import attend_route
from residua.ops import Demand, backends, choose_backend
from residua.ops import backend as registry
from residua.ops import select as selection
from residua.ops.backend import PRIMITIVES, Backend, TorchBackend
from tests.support.oracle import qkv, random_route

CPU = torch.device("cpu")


class Picky(TorchBackend):
    name = "picky"
    about = "takes little"
    preference = 99
    devices = ("cuda",)
    dtypes = (torch.bfloat16,)
    head_dims = (8, 64)


class Broken(TorchBackend):
    name = "broken"
    about = "never there"
    preference = 98

    def unavailable(self):
        return "no compiler here; install one"


@pytest.fixture
def more(monkeypatch):
    for backend in (Picky, Broken):
        monkeypatch.setitem(registry.BACKENDS.data, backend.name, backend())


def test_backends_are_listed_best_first(more):
    preferences = [backend.preference for backend in backends().values()]
    assert preferences == sorted(preferences, reverse=True)
    assert {"torch", "reference", "picky", "broken"} <= set(backends())


def test_every_reason_is_given_at_once(more):
    reasons = backends()["picky"].reasons(Demand(CPU, torch.float32, 100, 4))
    assert len(reasons) == 4
    for word in ("device cpu", "torch.float32", "head_dim=100: takes 8..64", "value head_dim=4"):
        assert any(word in reason for reason in reasons)


def test_auto_passes_over_those_that_cannot(more):
    chosen = choose_backend("auto", Demand(CPU, torch.float32, 16, 16))
    assert chosen.name not in ("picky", "broken", "reference")


def test_a_backend_asked_for_by_name_is_taken_or_refused(more):
    demand = Demand(CPU, torch.float32, 16, 16)
    assert choose_backend("torch", demand).name == "torch"
    assert choose_backend("reference", demand).name == "reference"
    with pytest.raises(BackendError, match=r"picky.*device cpu.*float32.*torch"):
        choose_backend("picky", demand)
    with pytest.raises(BackendError, match="no compiler here"):
        residua.attention(*qkv(), Config(backend="broken"))
    with pytest.raises(BackendError, match=r"quantum.*there are: auto"):
        choose_backend("quantum", demand)


def test_a_slow_backend_is_named_once_with_the_reason(monkeypatch, caplog):
    monkeypatch.setattr(selection, "_said", set())
    monkeypatch.setattr(type(backends()["native"]), "reasons", lambda self, demand: ["it was not built"])
    demand = Demand(CPU, torch.float32, 16, 16)
    for _ in range(2):
        assert choose_backend("auto", demand).name == "torch"
    choose_backend("torch", demand)
    [said] = [record.message for record in caplog.records]
    assert "may be slower than dense" in said and "it was not built" in said and "residua doctor" in said


def test_one_error_lists_every_backends_reasons(more, monkeypatch):
    monkeypatch.setattr(registry.BACKENDS, "data", {b.name: b() for b in (Picky, Broken)})
    with pytest.raises(BackendError, match=r"(?s)picky: device cpu.*broken: no compiler"):
        choose_backend("auto", Demand(CPU, torch.float32, 16, 16))


def test_auto_never_falls_back_to_what_is_chosen_by_name_only(monkeypatch):
    monkeypatch.setattr(registry.BACKENDS, "data", {"broken": Broken(), "reference": backends()["reference"]})
    with pytest.raises(BackendError, match="no backend takes this call"):
        choose_backend("auto", Demand(CPU, torch.float32, 16, 16))


def test_a_failure_inside_a_backend_is_not_hidden(monkeypatch):
    class Failing(TorchBackend):
        name = "failing"
        preference = 1000

        def attend(self, *args, **kwargs):
            raise RuntimeError("out of memory")

    monkeypatch.setitem(registry.BACKENDS.data, "failing", Failing())
    for call in (lambda: residua.attention(*qkv()), lambda: attend_route(*qkv(1, 2, 2, 90, 110), random_route())):
        with pytest.raises(RuntimeError, match="out of memory"):
            call()


def test_a_failure_in_the_middle_leaves_the_state_as_it_was(monkeypatch):
    from residua import State

    state, tensors = State(), qkv()
    config = Config(backend="torch")
    residua.attention(*tensors, config, state)
    kept = dict(vars(state))

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TorchBackend, "attend", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        residua.attention(*tensors, config, state)
    assert vars(state) == kept


def test_the_receipt_names_the_backend():
    for name in ("torch", "reference"):
        assert residua.attention(*qkv(), Config(backend=name), return_receipt=True)[1].backend == name


def test_a_primitive_is_a_public_method_of_a_subject_and_there_are_few():
    """Variants of one operation are one primitive; see docs/add-a-primitive.md."""
    assert "attend" in PRIMITIVES and len(set(PRIMITIVES)) == len(PRIMITIVES) <= 28
    assert all(callable(getattr(Backend, name)) for name in PRIMITIVES)
    about = {"unavailable", "reasons", "session", "release"}
    public = {name for name, member in vars(Backend).items() if callable(member) and not name.startswith("_")}
    assert public == about  # what a backend computes is in the subjects


def test_the_base_class_is_the_backend_in_plain_torch():
    """So that a backend need not override anything, and falls back to what is right."""
    assert not [name for name in PRIMITIVES if name in vars(TorchBackend)]


def test_a_call_runs_on_the_backend_of_its_session_and_releases_what_that_keeps(more, monkeypatch):
    seen = []

    class Bound(TorchBackend):
        def attend(self, *arguments, **options):
            seen.append("attend")
            return super().attend(*arguments, **options)

        def release(self):
            seen.append("release")

    monkeypatch.setattr(TorchBackend, "session", lambda self: nullcontext(Bound()))
    residua.attention(*qkv(), Config(backend="torch"))
    assert seen.count("release") == 1 and seen[-1] == "release" and "attend" in seen

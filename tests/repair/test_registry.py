"""The registered repairs: what they promise, and that a new one is a class and a name."""

from __future__ import annotations

import pytest
import torch
from oracle import masked_attention, qkv, small, worst

from residua import Config, InputError, attention
from residua.repair import REPAIRS, Plan, Repair, register
from residua.repair.base import route
from residua.routing import pair_budget


def test_the_four_are_registered():
    assert set(REPAIRS) == {"none", "probe", "tail", "anchored"}
    for name, repair in REPAIRS.items():
        assert repair.name == name and repair.summary and isinstance(repair, Repair)
    assert {name for name, repair in REPAIRS.items() if repair.all_in} == {"tail", "anchored"}
    assert REPAIRS["probe"].probes == "stratified" and REPAIRS["none"].probes is None
    assert REPAIRS["anchored"].probes == REPAIRS["tail"].probes == "scattered"


def test_an_unknown_repair_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"Config\.repair='taill': wanted one of") as refused:
        Config(repair="taill")
    assert all(repr(name) in str(refused.value) for name in REPAIRS)


@pytest.mark.parametrize("repair", sorted(REPAIRS))
def test_density_one_changes_nothing(repair):
    """No probes, no tail, no router: dense attention through the kernel."""
    q, k, v = qkv(2, 4, 2, 130, 140)
    out, receipt = attention(q, k, v, small(density=1, repair=repair), return_receipt=True)
    assert worst(out, masked_attention(q, k, v)[0]) < 1e-6
    assert torch.equal(out, attention(q, k, v, small(density=1, repair="none")))
    assert receipt.density == receipt.cost == 1.0 and receipt.flops == receipt.dense_flops
    assert receipt.pairs.probe == 0 and receipt.error is None and receipt.notes == ()


def test_a_new_repair_is_a_class(monkeypatch):
    monkeypatch.setattr("residua.repair.base.REPAIRS", REPAIRS)
    before = dict(REPAIRS)

    @register
    class Halved(Repair):
        name = "halved"
        summary = "for this test"

        def plan(self, work):
            return Plan(route(work, pair_budget(work.call, work.density, 0)))

        def finish(self, work, plan, out):
            return out / 2, None

    try:
        q, k, v = qkv()
        halved = attention(q, k, v, small(repair="halved", probes=0))
        assert torch.equal(halved, attention(q, k, v, small(repair="none", probes=0)) / 2)
    finally:
        REPAIRS.clear()
        REPAIRS.update(before)
    with pytest.raises(InputError, match="halved"):
        Config(repair="halved")

"""A shared budget follows the noise that the steps of a run remove."""

import pytest
import torch

from residua import Config
from residua.baselines.own import Own
from residua.hosts import HostAttention, Pass, ResolvedSettings, Site, make_report, noise_removed
from residua.method.budget import shares_of_steps

DENSITY = 0.3
SHARED = Config(
    density=DENSITY,
    balance=True,
    query_groups=6,
    kv_groups=16,
    probes=8,
    kmeans_cold=4,
    metric_rows=64,
    key_rank=8,
    query_rank=8,
    summary_slots=4,
    drift_rank=2,
)
REMOVED = noise_removed([1.0, 0.95, 0.85, 0.6, 0.0])


def run(config=SHARED, removed=REMOVED, heard=None, **settings):
    """A run of four steps and two layers; the densities that the calls were given, by step."""
    host = HostAttention(ResolvedSettings(config=config, min_tokens=0, **settings))
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        q, k, v = (torch.randn(1, 2, 300, 16, generator=draw) for _ in range(3))
        for layer in range(2):
            site = Site(layer, Pass(step, 4, removed=removed))
            host.call(q, k, v, site, lambda v=v: v)
    return host


@pytest.fixture
def given(monkeypatch):
    """The density of every sparse call, in order."""
    densities, attend = [], Own.attend

    def heard(self, q, k, v, config, state, **more):
        densities.append(config.density)
        return attend(self, q, k, v, config, state, **more)

    monkeypatch.setattr(Own, "attend", heard)
    return densities


def test_steps_that_remove_more_noise_may_spend_more_and_the_run_costs_what_it_may(given):
    host = run()
    by_step = given[::2]
    assert given[1::2] == by_step  # both layers alike
    assert by_step == sorted(by_step) and by_step[-1] > 2 * by_step[0]
    assert sum(by_step) / 4 == pytest.approx(DENSITY)
    assert make_report([host]).total.cost <= DENSITY * 1.01


def test_dense_first_steps_are_not_part_of_it(given):
    run(dense_steps=2)
    assert given[::2] == pytest.approx([DENSITY * share for share in shares_of_steps(REMOVED[2:])])


@pytest.mark.parametrize(
    "config, removed",
    [
        (SHARED, ()),  # a host that does not know
        (SHARED.replace(balance=False), REMOVED),  # a density for every head is one for every step
    ],
)
def test_otherwise_every_step_gets_the_same(config, removed, given):
    run(config, removed)
    assert given == [DENSITY] * 8


def test_steps_beyond_the_schedule_get_the_mean(given):
    run(removed=REMOVED[:2])
    assert given[4:] == [DENSITY] * 4


def test_a_density_above_one_is_one(given):
    run(SHARED.replace(density=0.9))
    assert max(given) == 1.0


def test_only_the_levels_of_a_flow_model_say_what_a_step_removes():
    assert noise_removed([1.0, 0.75, 0.25, 0.0]) == pytest.approx((0.25, 0.5, 0.25))
    assert noise_removed([14.6, 3.0, 0.0]) == noise_removed([0.5, -0.5]) == noise_removed([]) == ()

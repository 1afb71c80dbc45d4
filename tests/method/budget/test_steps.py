"""What the steps of a run may spend, by the noise that they remove."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residua.method.budget import shares_of_steps
from residua.method.budget.steps import MAX_SHARE, MIN_SHARE, RUNGS

noise = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60)


@given(noise)
def test_a_run_spends_what_it_may(removed):
    shares = shares_of_steps(removed)
    assert len(shares) == len(removed)
    assert math.fsum(shares) == pytest.approx(len(removed))
    assert max(shares) / min(shares) <= MAX_SHARE / MIN_SHARE * (1 + 1e-9)


@given(noise)
def test_who_removes_more_never_spends_less(removed):
    shares = dict(sorted(zip(removed, shares_of_steps(removed), strict=True)))
    assert list(shares.values()) == sorted(shares.values())


@given(st.lists(st.floats(0.5, 1.5), min_size=2, max_size=60))
def test_it_is_nearly_the_best_split_of_errors_that_fall_as_one_over_the_density(removed):
    """Within what rounding to rungs costs, where no limit is met."""
    shares = shares_of_steps(removed)
    total = sum(noise / share for noise, share in zip(removed, shares, strict=True))
    best = sum(noise**0.5 for noise in removed) ** 2 / len(removed)
    rung = 2 ** (1 / (2 * RUNGS))  # the most that rounding changes a share by
    worst = ((rung + 1 / rung) / 2) ** 2  # by Kantorovich's inequality: 1.5 %
    assert best * (1 - 1e-9) <= total <= best * worst * (1 + 1e-9)


def test_like_steps_spend_alike():
    assert shares_of_steps([0.1] * 7) == pytest.approx((1.0,) * 7)


@pytest.mark.parametrize("removed", [(), (0.2, 0.0, 0.1), (0.5, -0.1), (0.5, math.nan), (0.5, math.inf)])
def test_what_is_not_known_changes_nothing(removed):
    assert shares_of_steps(removed) == (1.0,) * len(removed)


def test_there_are_few_different_shares():
    """Every change of a share may change group counts, and then tokens are clustered again."""
    shift, steps = 7.0, 50
    levels = [1 - step / steps for step in range(steps)]
    shifted = [*(shift * x / (1 + (shift - 1) * x) for x in levels), 0.0]
    shares = shares_of_steps([a - b for a, b in itertools.pairwise(shifted)])
    assert shares == tuple(sorted(shares)) and len(set(shares)) <= 2 * RUNGS + 1

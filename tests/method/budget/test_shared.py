"""Budgets that heads share: the split is the optimum of its model and keeps its total."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from residua import State, attention
from residua.config import MAX_BALANCED_DENSITY
from residua.method.budget import SharedBudget
from residua.method.budget.shared import POWERS, fill
from residua.types import Choice
from tests.support.oracle import masked_attention, normal, small


def heads(count, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)

    return (draw(-8, -1), draw(*POWERS), draw(0.1, 10), draw(0.001, 0.02), torch.full((count,), 1 / count).double())


def total_error(density, log_scale, power, norm):
    return float((norm * (log_scale - power * density.log()).exp()).sum())


@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0.03, 0.5))
def test_the_split_keeps_its_total_and_its_bounds(seed, count, mean):
    log_scale, power, norm, minimum, share = heads(count, seed)
    density = fill(log_scale, power, norm, minimum, share, mean)
    assert (density >= minimum).all() and (density <= MAX_BALANCED_DENSITY).all()
    assert float((share * density).sum()) == pytest.approx(mean, rel=1e-6)


@given(st.integers(0, 10_000), st.integers(2, 12), st.floats(0.03, 0.3))
def test_no_exchange_between_two_heads_lowers_the_error(seed, count, mean):
    log_scale, power, norm, minimum, share = heads(count, seed)
    density = fill(log_scale, power, norm, minimum, share, mean)
    best = total_error(density, log_scale, power, norm)
    for giver in range(count):
        for taker in range(count):
            step = 0.01 * float(density[giver])
            moved = density.clone()
            moved[giver] -= step
            moved[taker] += step
            if moved[giver] < minimum[giver] or moved[taker] > MAX_BALANCED_DENSITY:
                continue
            assert total_error(moved, log_scale, power, norm) >= best * (1 - 1e-9)


def test_equal_heads_get_equal_parts():
    same = torch.zeros(5, dtype=torch.float64)
    density = fill(same, same + 1, same + 1, same + 0.01, same + 0.2, 0.08)
    assert torch.allclose(density, same + 0.08)


def played(mean, steps, errors, max_error=None, norm=1.0):
    """A run over two layers of two heads whose errors are known functions of the density."""
    budget = SharedBudget()
    spent = {}
    for _ in range(steps):
        for owner in ("first", "second"):
            allowed = budget.allowance(owner, mean, max_error)
            if allowed is None:
                allowed = torch.full((1, 2), mean, dtype=torch.float64)
            spent[owner] = allowed
            error = torch.tensor([[errors[owner, h](float(allowed[0, h])) for h in range(2)]])
            minimum = torch.tensor(0.01).double()
            budget.learn(owner, allowed, error, torch.full((1, 2), norm), minimum, 1e6, mean)
    return spent


def test_layers_share_one_total_and_hard_heads_get_more():
    errors = {
        ("first", 0): lambda d: 0.01 * (0.08 / d),
        ("first", 1): lambda d: 0.2 * (0.08 / d) ** 2,
        ("second", 0): lambda d: 0.02 * (0.08 / d),
        ("second", 1): lambda d: 0.02 * (0.08 / d),
    }
    first = played(0.08, 1, errors)
    assert all((density == 0.08).all() for density in first.values())  # nothing is known yet
    for steps in (2, 6):
        spent = played(0.08, steps, errors)
        assert float(torch.cat([*spent.values()]).mean()) == pytest.approx(0.08, rel=1e-6)
        assert spent["first"][0, 1] > 1.5 * 0.08 and spent["first"][0, 0] < 0.08
        assert spent["second"][0, 0] == pytest.approx(float(spent["second"][0, 1]))


def test_a_bound_may_cost_more_than_the_budget():
    def hard(density):
        return 0.5 * (0.05 / density) ** 1.0

    errors = {(owner, h): hard for owner in ("first", "second") for h in range(2)}
    spent = played(0.05, 5, errors, max_error=0.25)
    assert torch.allclose(spent["first"], torch.tensor(0.1).double(), rtol=0.05)
    unbounded = played(0.05, 5, errors)
    assert torch.allclose(unbounded["first"], torch.tensor(0.05).double(), rtol=1e-6)


def test_what_a_head_outputs_is_what_its_error_counts_for():
    budget = SharedBudget()
    mean, minimum = torch.full((1, 2), 0.1).double(), torch.tensor(0.01).double()
    budget.learn("layer", mean, torch.full((1, 2), 0.1), torch.tensor([[1.0, 9.0]]), minimum, 1e6, 0.1)
    allowed = budget.allowance("layer", 0.1, None)
    # error ~ 1 / density: the optimum goes with the root of the norm
    assert float(allowed[0, 1] / allowed[0, 0]) == pytest.approx(3.0, rel=1e-6)


def of_equal_heads(density=0.1, norm=1.0, count=4):
    """A budget that knows one layer of heads with the same error, and what it was told."""
    budget = SharedBudget()
    allowed = torch.full((1, count), density, dtype=torch.float64)
    told = {"norm": torch.full((1, count), norm), "minimum": torch.full_like(allowed, 0.01), "pairs": 1e6}
    budget.learn("layer", allowed, torch.full((1, count), 0.1), mean=density, **told)
    return budget, allowed, told


def test_the_minimum_is_that_of_the_coming_call():
    """Sizes follow the density of the step: what was enough in the step before may be too little now."""
    budget, _, told = of_equal_heads()
    budget.learn(
        "layer", torch.tensor([[0.1, 0.1, 0.1, 0.1]]).double(), torch.tensor([[1e-6, 0.1, 0.1, 0.1]]), mean=0.1, **told
    )
    minimum = torch.full((1, 4), 0.15, dtype=torch.float64)
    allowed = budget.allowance("layer", 0.2, None, minimum)
    assert float(allowed[0, 0]) == pytest.approx(0.15) and bool((allowed >= minimum).all())
    assert float(allowed.mean()) == pytest.approx(0.2, rel=1e-6)  # the others pay for it


def test_a_power_is_what_a_head_gains_over_the_others():
    """All heads get twice as much and have the same error as before, because the step is harder: that says
    nothing about the power of any head."""
    budget, allowed, told = of_equal_heads()
    before = budget._models["layer"].power
    budget.learn("layer", 2 * allowed, torch.full((1, 4), 0.1), mean=0.2, **told)
    assert torch.equal(budget._models["layer"].power, before)
    # one head gets twice as much as the others, and loses half of its error
    alone = torch.tensor([[0.8, 0.4, 0.4, 0.4]]).double()
    budget.learn("layer", alone, torch.tensor([[0.025, 0.05, 0.05, 0.05]]), mean=0.4, **told)
    power = budget._models["layer"].power
    assert float(power[0, 0]) == pytest.approx(1.0) and torch.equal(power[0, 1:], before[0, 1:])


def test_reset_forgets():
    budget = SharedBudget()
    budget.learn(
        "layer",
        torch.full((1, 1), 0.1).double(),
        torch.ones(1, 1),
        torch.ones(1, 1),
        torch.tensor(0.01).double(),
        1e6,
        0.1,
    )
    budget.reset()
    assert budget.allowance("layer", 0.1, None) is None


def test_calls_of_two_layers_share_a_budget():
    """One layer that looks at everything alike, one of noise: pairs move to the second, the mean stays."""
    easy = (0.3 * normal(1, 2, 400, 16, seed=1), normal(1, 2, 400, 16, seed=2), normal(1, 2, 400, 16, seed=3) + 2)
    hard = (2.0 * normal(1, 2, 400, 16, seed=4), normal(1, 2, 400, 16, seed=5), normal(1, 2, 400, 16, seed=6) + 2)
    config, budget = small(density=0.4, balance=True), SharedBudget()
    states = [State(budget), State(budget)]
    for _ in range(4):
        receipts = [
            attention(*call, config, state, return_receipt=True)[1]
            for call, state in zip((easy, hard), states, strict=True)
        ]
    spent = [receipt.allowed.mean().item() for receipt in receipts]
    assert spent[1] > 1.3 * spent[0] and sum(spent) / 2 == pytest.approx(0.4, rel=1e-6)
    assert sum(receipt.cost for receipt in receipts) / 2 <= 0.4 + 1e-3


def test_repeats_are_the_same():
    calls = [normal(1, 2, 300, 16, seed=seed) for seed in range(3)]
    outs = []
    for _ in range(2):
        state = State()
        outs.append([attention(*calls, small(density=0.4, balance=True), state) for _ in range(3)])
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)


def test_a_guard_makes_a_hopeless_head_dense_and_counts_it():
    q, k, v = (normal(1, 2, 300, 16, seed=seed) for seed in range(3))
    state = State()
    for _ in range(6):
        out, receipt = attention(
            3 * q, k, v, small(density=0.3, balance=True, max_error=0.01), state, return_receipt=True
        )
    assert receipt.chosen["dense"] == 2 and (receipt.allowed >= MAX_BALANCED_DENSITY).all()
    assert (out.double() - masked_attention(3 * q, k, v)[0]).norm() < 1e-5 * out.norm()


@pytest.mark.parametrize("bound", [0.01, 0.02, 0.05, 0.07, 0.1, 0.13])
def test_a_head_that_has_to_be_dense_stays_dense(bound):
    """The same call in every step: a head must not be sparse again by a rounding error of its model."""
    q, k, v = (normal(1, 2, 300, 16, seed=seed) for seed in range(3))
    config, state = small(density=0.3, balance=True, max_error=bound), State()
    dense = []
    for _ in range(12):
        _, receipt = attention(3 * q, k, v, config, state, return_receipt=True)
        dense.append(receipt.choice_per_head == Choice.DENSE)
    assert torch.stack(dense[4:]).all()


def test_layers_on_several_gpus_share_a_budget():
    """Of a model that is spread over them: every layer gets its part where it is."""
    with FakeTensorMode():
        budget, devices = SharedBudget(), {"first": "cuda:0", "second": "cuda:1"}
        for owner, device in devices.items():
            known = torch.full((1, 3), 0.1, dtype=torch.float64, device=device)
            budget.learn(owner, known, known, known, known / 10, 1e6, 0.1)
        for owner, device in devices.items():
            minimum = torch.full((1, 3), 0.02, dtype=torch.float64, device=devices[owner])
            allowed = budget.allowance(owner, 0.1, 0.2, minimum)
            assert allowed is not None and allowed.device == torch.device(device)

"""The dials that learn from call to call: an error bound, and a budget that goes where the error is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua import Config, InputError, State, attention
from residua.method.budget import bounded
from residua.method.budget.bounded import MAX_STEP, POWER, SHARE
from residua.method.inputs import validate
from residua.method.reconstructions import MIN_BUDGET, Anchored
from residua.method.sizes import of_skippable, of_whole_call
from tests.support.making import grouped_call
from tests.support.oracle import masked_attention, normal, qkv, small, worst

DENSITY = 0.6


def mixed(step=0):
    """Head 0: rows that look at everything alike. Head 1: keys and values of noise, of which nothing can be
    summarised. Head 2: in between."""
    gain = torch.tensor([0.3, 3.0, 1.2]).view(1, 3, 1, 1)
    q, k = gain * normal(1, 3, 400, 16, seed=1), normal(1, 3, 400, 16, seed=2)
    v = normal(1, 3, 400, 16, seed=3) + torch.tensor([2.0, 0.0, 1.0]).view(1, 3, 1, 1)
    return q + 0.01 * step * normal(1, 3, 400, 16, seed=4), k, v


def run(config, steps, state=None, call=mixed):
    state = state or State()
    found = [attention(*call(step), config, state, return_receipt=True) for step in range(steps)]
    return [out for out, _ in found], [receipt for _, receipt in found]


def budgets(*shape, seed, low=0.02, high=0.9):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


@given(st.integers(0, 10_000), st.floats(0.001, 0.9))
def test_under_a_bound_a_budget_follows_the_error_at_the_ceiling(seed, bound):
    config = small(density=0.5, max_error=bound)
    spent, error = budgets(1, 5, seed=seed, high=0.5), budgets(1, 5, seed=seed + 1, low=1e-4)
    least = torch.tensor(0.01).double()
    found = bounded.next_budget(spent, error, least, ceiling=0.5, bound=config.max_error)
    assert ((found <= 0.5) & (found >= 0.01)).all()
    ratio = found / spent
    assert ((ratio <= MAX_STEP + 1e-9) & (ratio >= 1 / MAX_STEP - 1e-9)).all()
    inside = (found > 0.01) & (found < 0.5) & (ratio < MAX_STEP - 1e-6) & (ratio > 1 / MAX_STEP + 1e-6)
    at_ceiling = error * (spent / 0.5) ** POWER
    assert torch.allclose(found[inside], 0.5 * (at_ceiling[inside] / bound) ** SHARE)
    # and if the error does fall with that power, the bound holds
    assert (at_ceiling[inside] * (0.5 / found[inside]) ** POWER <= bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("at_ceiling", [0.001, 0.01, 0.05])
def test_under_a_bound_a_steady_head_settles(at_ceiling):
    config = small(density=0.5, max_error=0.05)
    least = torch.tensor(0.01).double()
    spent = torch.full((1, 1), 0.5).double()
    for _ in range(12):
        error = at_ceiling * (0.5 / spent) ** POWER
        spent = bounded.next_budget(spent, error, least, ceiling=0.5, bound=config.max_error)
    assert float(spent) == pytest.approx(0.5 * (at_ceiling / 0.05) ** SHARE)
    assert float(at_ceiling * (0.5 / spent) ** POWER) <= 0.05 * (1 + 1e-9)


def test_a_head_above_the_bound_keeps_the_ceiling_and_nan_asks_for_more():
    error = torch.tensor([[0.3, float("nan"), float("inf")]])
    spent = torch.tensor([[0.5, 0.1, 0.1]]).double()
    found = bounded.next_budget(spent, error, torch.tensor(0.01).double(), ceiling=0.5, bound=0.1)
    assert found[0, 0] == 0.5
    assert found[0, 1:].tolist() == pytest.approx([0.1 * MAX_STEP, 0.1 * MAX_STEP])


def test_the_error_settles_below_the_bound_and_easy_heads_spend_less():
    bound = 0.12
    _, receipts = run(small(density=DENSITY, max_error=bound), 8)
    for receipt in receipts[3:]:
        assert (receipt.error_per_head <= 1.1 * bound).all()
    last = receipts[-1]
    assert last.chosen["dense"] == 1 and last.choice_per_head[0, 1] == 3  # the noise
    assert last.allowed[0, 0] < 0.6 * DENSITY and last.allowed[0, 1] == DENSITY
    assert last.per_head.density()[0, 0] < receipts[0].per_head.density()[0, 0]
    assert (last.allowed <= DENSITY).all()


def test_a_hopeless_head_runs_dense_and_is_counted():
    outs, receipts = run(small(density=DENSITY, max_error=0.12), 2)
    for step, (out, receipt) in enumerate(zip(outs, receipts, strict=True)):
        q, k, v = mixed(step)
        assert receipt.choice_per_head[0, 1] == 3 and receipt.error_per_head[0, 1] == 0
        assert worst(out[:, 1], masked_attention(q[:, 1:2], k[:, 1:2], v[:, 1:2])[0][:, 0]) < 1e-6
        assert int(receipt.per_head.routed[0, 1]) == 400 * 400
        assert receipt.chosen["dense"] == 1 and receipt.to_dict()["chosen"]["dense"] == 1
        assert any("1 of 3 heads ran dense" in note and "max_error" in note for note in receipt.notes)
        assert not any("above the target" in note for note in receipt.notes)


def test_a_bound_that_nothing_meets_is_dense_attention():
    q, k, v = mixed()
    out, receipt = attention(q, k, v, small(density=DENSITY, max_error=1e-9), return_receipt=True)
    assert worst(out, masked_attention(q, k, v)[0]) < 1e-6
    assert receipt.chosen["dense"] == 3 and receipt.density >= 1


def test_a_bound_that_everything_meets_is_cheap():
    _, receipts = run(small(density=DENSITY, max_error=1.0), 8, call=lambda step: qkv(heads=3, queries=400))
    assert receipts[-1].cost < 0.6 * receipts[0].cost  # a fourth root: never all of what could be saved
    minimum = [receipt.cost for receipt in receipts[-2:]]
    assert minimum[0] == pytest.approx(minimum[1], rel=0.2)  # what the reconstruction needs is where it ends
    assert receipts[-1].chosen["dense"] == 0


def test_density_one_with_a_bound_is_still_sparse():
    """The bound decides; the ceiling is just open."""
    _, receipts = run(small(density=1.0, max_error=0.3), 6, call=lambda step: qkv(heads=3, queries=400))
    assert receipts[-1].cost < 0.8 and receipts[-1].error <= 0.33


def test_balance_keeps_the_total_and_lowers_the_absolute_error():
    config = small(density=0.4)
    outs, _ = run(config, 6)
    moved_outs, moved = run(config.replace(balance=True), 6)
    for receipt in moved:
        assert float(receipt.allowed.mean()) == pytest.approx(0.4, rel=1e-6)
        assert receipt.cost <= 0.4 + 1e-3
    assert (moved[0].allowed == 0.4).all() and not (moved[-1].allowed == 0.4).any()
    dense = masked_attention(*mixed(5))[0]
    fixed_error, moved_error = ((out - dense).norm(dim=-1).mean() for out in (outs[-1], moved_outs[-1]))
    assert moved_error < 0.97 * fixed_error


@pytest.mark.parametrize("settings", [{"max_error": 0.12}, {"balance": True}])
def test_it_repeats_exactly(settings):
    config = small(density=DENSITY, **settings)
    first, second = run(config, 4), run(config, 4)
    assert all(torch.equal(x, y) for x, y in zip(first[0], second[0], strict=True))
    assert all(torch.equal(x.allowed, y.allowed) for x, y in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("settings", [{"density": DENSITY, "max_error": 0.12}, {"density": 0.3, "balance": True}])
def test_reset_forgets_what_was_learned(settings):
    config, state = small(**settings), State()
    outs, receipts = run(config, 3, state)
    assert not (receipts[-1].allowed == config.density).all()
    state.reset()
    again, fresh = run(config, 1, state)
    assert (fresh[0].allowed == config.density).all() and torch.equal(again[0], outs[0])


@pytest.mark.parametrize(
    "change",
    [
        {"density": 0.5},
        {"max_error": 0.2},
        {"max_error": None},
        {"reconstruction": "tail"},
        {"max_error": None, "balance": True},
    ],
)
def test_what_was_learned_for_another_question_is_not_used(change):
    config, state = small(density=DENSITY, max_error=0.12), State()
    run(config, 3, state)
    other = config.replace(**change)
    _, receipts = run(other, 1, state)
    assert (receipts[0].allowed == other.density).all() and receipts[0].warm


def test_another_shape_starts_from_the_ceiling():
    config, state = small(density=DENSITY, max_error=0.12), State()
    run(config, 3, state)
    _, receipts = run(config, 1, state, call=lambda step: qkv(heads=3, queries=390))
    assert (receipts[0].allowed == DENSITY).all()


def test_without_a_state_nothing_is_learned():
    config = small(density=DENSITY, max_error=0.12)
    q, k, v = mixed()
    first, second = (attention(q, k, v, config, return_receipt=True) for _ in range(2))
    assert torch.equal(first[0], second[0]) and (second[1].allowed == DENSITY).all()


def test_fixed_budgets_leave_nothing_behind():
    state = State()
    run(small(), 2, state)
    assert state.budget is None and state._budget_key is None


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_error": 0.1, "reconstruction": "probe"}, "Config.max_error needs an error estimate.*='probe'"),
        ({"max_error": 0.1, "reconstruction": "none"}, "Config.max_error needs"),
        ({"max_error": 0.1, "probes": 0}, "Config.max_error needs.*probes=0"),
        ({"balance": True, "reconstruction": "probe"}, "Config.balance needs"),
        ({"balance": True, "probes": 0}, "Config.balance needs"),
        *(
            ({"max_error": bad}, r"Config\.max_error=.*wanted a number above 0 to 1")
            for bad in (0, -0.1, 1.5, float("nan"), "0.1", True)
        ),
        *(({"balance": bad}, r"Config\.balance=.*wanted true or false") for bad in (1, None, "yes")),
        *(({"drift_rank": bad}, r"Config\.drift_rank=.*wanted") for bad in (-1, 1.5)),
        *(({"summary_slots": bad}, r"Config\.summary_slots=.*wanted") for bad in (0, -1, 2.0)),
    ],
)
def test_dials_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Config(**settings)


def test_dials_that_do():
    bound = {"max_error": 1.0, "reconstruction": "tail"}
    for settings in ({"max_error": 0.1}, bound, {"balance": True}, {"drift_rank": 0}):
        assert Config.from_dict(Config(**settings).to_dict()) == Config(**settings)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("settings", [{"balance": True}, {"max_error": 0.9}])
def test_a_budget_that_moves_is_for_what_may_be_skipped(settings, masked):
    """Text that would use up the whole budget comes on top of it, and what was learned is of the rest."""
    q, k, v = qkv(1, 2, 2, 400, 400)
    text, valid = (300, 400), 70 if masked else 100
    spans = {"pinned_keys": text, "exact_queries": (300, 300 + valid)}
    if masked:
        spans["key_mask"] = (torch.arange(400) < 300 + valid)[None]
    config = small(density=0.3, probes=16, **settings)
    state = State()
    costs = []
    for _ in range(3):
        _, receipt = attention(q, k, v, config, state, return_receipt=True, **spans)
        costs.append(receipt.cost)
    keys = 300 + valid
    held = (valid * keys + (400 - valid) * valid) / (400 * keys)
    assert held > 0.3
    assert costs[0] == pytest.approx(held + 0.3 * (1 - held), abs=0.03)
    assert all(held < cost <= held + 0.7 * (1 - held) for cost in costs[1:])


@pytest.mark.parametrize("masked", [False, True])
def test_the_least_useful_budget_is_of_what_may_be_skipped(masked):
    """The work beside the pairs is paid from the same part of the call as the budget that moves."""
    q, k, v = qkv(1, 2, 2, 400, 400)
    mask = {"key_mask": (torch.arange(400) < 380)[None]} if masked else {}
    text = {"pinned_keys": (300, 400), "exact_queries": (300, 400)}
    keys = 380 if masked else 400
    work = grouped_call(q, k, v, small(probes=16), **text, **mask)
    cost = sum(part.at(float(keys)) for part in Anchored().summary_costs(work).values())
    cost += Anchored().routing_cost(work).at(float(keys)) + work.sizes.probes * keys
    assert float(Anchored().min_density(work)) == pytest.approx(MIN_BUDGET * cost / (300 * 300))


def test_a_fixed_budget_pays_for_text_too():
    q, k, v = qkv(1, 2, 2, 400, 400)
    spans = {"pinned_keys": (360, 400), "exact_queries": (360, 400)}
    _, receipt = attention(q, k, v, small(density=0.4, probes=16), return_receipt=True, **spans)
    assert receipt.cost <= 0.4


@given(st.floats(0.01, 1.0), st.integers(0, 60), st.integers(0, 60), st.integers(1, 60))
def test_densities_with_and_without_text_are_each_others_reverse(density, exact, pinned, valid):
    mask = (torch.arange(64) < max(valid, pinned + 1))[None]
    call = validate(*qkv(1, 1, 1, 64, 64), pinned_keys=(0, pinned), exact_queries=(0, exact), key_mask=mask)
    free = torch.full((1, 1), density, dtype=torch.float64)
    whole = of_whole_call(call, free)
    assert density <= float(whole) + 1e-12 <= 1 + 1e-9
    assert torch.allclose(of_skippable(call, whole), free)

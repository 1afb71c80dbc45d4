"""The judge: the error estimate is the true error of the probe rows, and the choice follows it."""

from types import SimpleNamespace

import pytest
import torch

from residua import attention
from residua.method.inputs import validate
from residua.method.judge import choose
from residua.method.reconstructions import weighted_error
from residua.ops import backends
from residua.types import Choice, Probes
from tests.support.making import grouped_call, stages
from tests.support.oracle import expand_heads, masked_attention, normal, paper, qkv, small

DRIFT, STILL, PLAIN, DENSE = Choice


def chosen(errors, without_summary=False, density=0.22, **settings):
    """What the judge makes of candidates with these relative errors, for one head: -> choice, error."""
    allowed = torch.full((1, 1), density, dtype=torch.float64)
    backend = backends()["torch"]
    call = validate(*qkv(1, 1, 1, 16, 16))  # without text
    work = SimpleNamespace(call=call, config=small(density=0.22, **settings), allowed=allowed, backend=backend)
    rows = torch.tensor(errors).view(-1, 1, 1, 1).expand(-1, 1, 1, 6)
    choice, error = choose(work, rows, torch.ones(1, 1, 6), torch.tensor([[without_summary]]))
    return int(choice), float(error)


@pytest.mark.parametrize(
    "errors, choice",
    [
        ((0.2, 0.3, 0.4), DRIFT),
        ((0.2, 0.19, 0.195), DRIFT),  # better, but not by enough to be more than noise
        ((0.2, 0.17, 0.4), STILL),
        ((0.2, 0.17, 0.16), STILL),
        ((0.2, 0.17, 0.1), PLAIN),
        ((0.2, 0.5, 0.17), PLAIN),
        ((0.0, 0.0, 0.0), DRIFT),
        ((float("nan"), 0.1, 0.1), DRIFT),  # what is wrong stays visible
    ],
)
def test_a_simpler_candidate_must_be_clearly_better(errors, choice):
    found, error = chosen(errors)
    assert found == choice
    assert error == pytest.approx(errors[choice], rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_head_without_summary_has_none_to_choose():
    assert chosen((0.1, 0.2, 0.3), without_summary=True) == (PLAIN, pytest.approx(0.3, rel=1e-4))


def test_a_head_runs_dense_only_if_all_that_it_may_spend_is_not_enough():
    assert chosen((0.3, 0.4, 0.5), max_error=0.2) == (DENSE, pytest.approx(0.3, rel=1e-4))
    assert chosen((0.3, 0.4, 0.5), without_summary=True, max_error=0.2) == (DENSE, pytest.approx(0.5, rel=1e-4))
    assert chosen((0.29, 0.4, 0.5), density=0.1, max_error=0.2)[0] == DRIFT  # it will be given more
    assert chosen((0.3, 0.4, 0.1), max_error=0.2) == (PLAIN, pytest.approx(0.1, rel=1e-4))
    assert chosen((0.3, 0.4, 0.5))[0] == DRIFT  # nobody asked


def test_a_head_that_is_clearly_above_its_bound_does_not_wait_for_more():
    assert chosen((0.31, 0.4, 0.5), density=0.1, max_error=0.2)[0] == DENSE
    assert chosen((0.31, 0.4, 0.5), density=0.1, max_error=0.2, balance=True)[0] == DENSE
    assert chosen((0.31, 0.4, 0.25), density=0.1, max_error=0.2, balance=True)[0] == PLAIN


def test_the_guard_holds_in_the_first_call():
    """Nothing was learned yet; the report still says 0 for a head that is computed in full."""
    q, k, v = (normal(1, 2, 400, 16, seed=seed) for seed in range(3))
    config = small(density=0.3, balance=True, max_error=0.2)
    out, receipt = attention(3 * q, k, v, config, return_receipt=True)
    assert (receipt.choice_per_head == DENSE).all() and (receipt.error_per_head == 0).all()
    assert torch.allclose(out.double(), masked_attention(3 * q, k, v)[0], atol=1e-5)


def test_the_mean_follows_the_weights():
    exact = torch.ones(1, 1, 3, 4)
    out = exact * torch.tensor([1.1, 1.2, 5.0]).view(1, 1, 3, 1)
    probes = Probes(torch.arange(3).view(1, 1, 3), torch.tensor([[[30.0, 10.0, 0.0]]]), exact)
    assert float(weighted_error(out - exact, probes)) == pytest.approx((30 * 0.1 + 10 * 0.2) / 40, rel=1e-5)


@pytest.mark.parametrize("reconstruction", ["anchored", "tail"])
@pytest.mark.parametrize(
    "spans", [{}, {"pinned_keys": (0, 20), "exact_queries": (280, 300), "key_mask": True}], ids=["free", "text"]
)
@pytest.mark.parametrize("policy", [None, "random"])
def test_the_estimate_is_the_true_error_at_the_probes(reconstruction, spans, policy):
    """Before their exact outputs are put in place: what the call would give there, against dense
    attention."""
    q, k, v = qkv(2, 4, 2, 300, 280)
    if "key_mask" in spans:
        spans = {**spans, "key_mask": torch.arange(280)[None] < torch.tensor([[280], [251]])}
    config = small(reconstruction=reconstruction, density=0.5, probe_policy=policy)
    work = grouped_call(q, k, v, config, **spans)
    plan = stages(reconstruction, work)
    assert (plan.choice <= STILL).any()
    out, _ = work.backend.attend(q, k, v, plan.route, work.call.scale, plan.summary, torch.float32)
    mask = None if work.call.key_mask is None else work.call.key_mask[:, None, None]
    dense, _ = masked_attention(q, k, v, mask)
    relative = (out - dense).norm(dim=-1) / dense.norm(dim=-1)  # [B, H, Nq]
    at_probes = relative.gather(-1, plan.probes.rows)
    weights = plan.probes.weights.double()
    wanted = (at_probes * weights).sum(-1) / weights.sum(-1)
    assert torch.allclose(plan.error.double(), wanted, rtol=1e-3, atol=1e-5)
    assert torch.allclose(
        plan.probes.exact.double(), torch.take_along_dim(dense, plan.probes.rows[..., None], 2), atol=1e-5
    )
    _, receipt = attention(q, k, v, config, **spans, return_receipt=True)
    assert torch.equal(receipt.error_per_head, plan.error)


def test_the_estimate_is_near_the_error_of_all_rows():
    q, k, v = qkv(1, 32, 32, 500, 500)
    out, receipt = attention(q, k, v + 1, small(density=0.4, probes=64), return_receipt=True)
    dense, _ = masked_attention(q, k, v + 1)
    true = ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean(-1)
    true = true * 500 / (500 - 64)  # the probe rows themselves have none
    off = (receipt.error_per_head / true).log().abs()
    assert (off < 0.5).double().mean() >= 0.9
    assert off.max() < 0.8
    assert receipt.error == pytest.approx(float(true.mean()), rel=0.1)


def test_probe_policies_are_heard():
    q, k, v = qkv()
    rows = {}
    for policy in (None, "scattered", "stratified", "uniform", "random"):
        config = small(probe_policy=policy)
        rows[policy] = stages("anchored", grouped_call(q, k, v, config)).probes.rows
    assert torch.equal(rows[None], rows["scattered"])
    different = [rows[policy] for policy in ("scattered", "stratified", "uniform", "random")]
    assert all(not torch.equal(x, y) for i, x in enumerate(different) for y in different[:i])


def test_the_pairs_of_the_judging_are_those_of_the_probes_with_their_kept_cells():
    """Their scores are known from the exact pass, so only the values count: Dv of D + Dv products."""
    q, k, v = qkv(1, 4, 2, 300, 280, 16, 24)
    work = grouped_call(q, k, v, small(density=0.5), pinned_keys=(0, 10))
    plan = stages("anchored", work)
    sizes = expand_heads(plan.route.kv.sizes, 4)
    for h in range(4):
        groups = plan.route.query.labels[0, h, plan.probes.rows[0, h]]
        pairs = sum(int((plan.route.cells[0, h, a] * sizes[0, h]).sum()) for a in groups)
        assert float(plan.costs()["judging"][0, h]) == pytest.approx(pairs * 24 / 40)


def test_a_summary_without_drift_does_not_claim_one():
    for config in (small(reconstruction="tail", drift_rank=0), small(drift_rank=0)):
        _, receipt = attention(*qkv(), config, return_receipt=True)
        assert receipt.chosen == {"with drift": 0, "without drift": 2, "without summary": 0, "dense": 0}
    _, receipt = attention(*qkv(), paper(), return_receipt=True)
    assert receipt.chosen == {}

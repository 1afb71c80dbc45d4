"""Reconstructions through a summary: what they may cost, what they cost, and that they do no harm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residua import Config, attention
from residua.ops import backends
from residua.tools.synthetic import VideoLike, video_like
from residua.types import Choice, Drift, SummaryKeys
from tests.support.making import grouped_call, stages
from tests.support.oracle import expand_heads, masked_attention, normal, qkv, small, worst

SUMMARISED = ["anchored", "tail"]


def mean_error(out, dense):
    return float(((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean())


shapes = {
    "seed": st.integers(0, 10_000),
    "queries": st.integers(1, 260),
    "keys": st.integers(1, 260),
    "kv_heads": st.integers(1, 2),
    "shares": st.integers(1, 2),
    "density": st.sampled_from([0.05, 0.22, 0.5, 0.9]),
    "groups": st.tuples(st.integers(1, 9), st.integers(1, 20)),
    "slots": st.integers(1, 24),
    "rank": st.integers(0, 8),
    "probes": st.integers(0, 24),
    "text": st.booleans(),
    "padding": st.booleans(),
    "score": st.sampled_from(["mass", "centroid"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("reconstruction", SUMMARISED)
@settings(max_examples=60)
@given(**shapes)
def test_a_call_costs_no_more_than_it_may(
    reconstruction, seed, queries, keys, kv_heads, shares, density, groups, slots, rank, probes, text, padding, score
):
    """All in: pairs, probes, router, summary and the judging. Only what must be kept may be above: one cell
    of every query group, pinned keys, exact rows."""
    q, k, v = qkv(2, kv_heads * shares, kv_heads, queries, keys, 8, 12, seed=seed)
    spans = {}
    if text and queries > 4 and keys > 4:
        spans = {"pinned_keys": (keys - 2, keys), "exact_queries": (0, 2)}
    if padding:
        spans["key_mask"] = torch.arange(keys)[None] < torch.tensor([[keys], [max(1, keys // 2)]])
    config = small(
        reconstruction=reconstruction,
        density=density,
        query_groups=groups[0],
        kv_groups=groups[1],
        summary_slots=slots,
        drift_rank=rank,
        probes=probes,
        score=score,
        kmeans_cold=2,
    )
    out, receipt = attention(q, k, v, config, **spans, return_receipt=True)
    assert out.isfinite().all()

    possible = receipt.per_head.possible.double()
    spent = receipt.per_head.total + sum(receipt.beside.values())
    plan = stages(reconstruction, grouped_call(q, k, v, config, **spans))
    free = plan.route.kv.groups - plan.route.pinned_groups
    minimum = (plan.route.cells[..., :free].sum(-1) <= 1).all(-1)  # [B, H], nothing beyond one cell per group
    over = spent > density * possible + 0.5
    assert (minimum | ~over).all()
    said = any("above the target" in note for note in receipt.notes)
    assert said == bool(over.any())

    assert receipt.cost == pytest.approx(sum(receipt.costs.values()), rel=1e-9)
    assert receipt.cost == pytest.approx(float(spent.sum() / possible.sum()), rel=1e-6)
    assert receipt.flops == pytest.approx(receipt.cost * receipt.dense_flops, rel=1e-6)
    assert receipt.density == pytest.approx(sum(receipt.costs[p] for p in ("routed", "probe", "pinned", "exact")))


def test_every_kind_of_work_is_what_it_says():
    """Counted by hand, for 4 heads of 300 x 280 with 8 and 16 groups, D = 16, Dv = 24."""
    q, k, v = qkv(1, 4, 2, 300, 280, 16, 24)
    _, receipt = attention(q, k, v, small(density=0.5), return_receipt=True)
    assert receipt.chosen["without summary"] == 0
    rows, pair, dense = 300, 16 + 24, 4 * 300 * 280
    per_head = {
        "routing": 8 * 280 * 16 / pair,
        "anchors": 8 * 280 * (16 + 16 + 24) / pair,  # scores again, then mean keys and values
        "summary": rows * 8,
        "covariances": rows * 2 + 280 * 2 / 2 + 2 * 8 * 4 * 2 * 24 / pair,  # in and among 4 pools
    }
    for name, work in per_head.items():
        assert receipt.costs[name] == pytest.approx(4 * work / dense), name
        assert receipt.beside[name].shape == (1, 4)
    assert set(receipt.costs) == {"routed", "probe", "pinned", "exact", "judging", *per_head}
    assert receipt.costs["probe"] == pytest.approx(16 / 300)
    plain = receipt.to_dict()
    assert plain["cost"] == receipt.cost and plain["costs"] == receipt.costs and plain["chosen"] == receipt.chosen


def test_every_kind_of_work_of_the_tail_is_what_it_says():
    q, k, v = qkv(1, 4, 2, 300, 280, 16, 24)
    _, receipt = attention(q, k, v, small(density=0.5, reconstruction="tail"), return_receipt=True)
    assert receipt.chosen["without summary"] == 0
    pair = 16 + 24
    per_head = {
        "routing": 8 * 16 * 16 / pair + 280 * (16 + 16 + 16 + 24) / pair / 2,  # of two heads: one mean query
        "summary": 300 * 8 + 8 * 16,
        "covariances": 300 * 2 + 280 * 2 / 2 + 2 * 8 * 4 * 2 * 24 / pair,
    }
    for name, work in per_head.items():
        assert receipt.costs[name] == pytest.approx(work / (300 * 280)), name
    assert set(receipt.costs) == {"routed", "probe", "pinned", "exact", "judging", *per_head}


def test_a_head_without_a_summary_does_not_pay_for_one():
    q, k, v = qkv(queries=200)
    _, receipt = attention(20 * q, k, v, small(density=0.5), return_receipt=True)
    assert receipt.chosen["without summary"] == 2
    assert receipt.costs["summary"] == receipt.costs["anchors"] == receipt.costs["covariances"] == 0
    assert any("2 of 2 heads run without a summary" in note for note in receipt.notes)


def test_a_budget_too_small_for_anchors_gets_centres_and_says_so():
    q, k, v = qkv(queries=200)
    dear = {"summary_slots": 16, "drift_rank": 16}
    out, receipt = attention(q, k, v, small(**dear), return_receipt=True)
    assert any("centres of the groups stand in for them" in note for note in receipt.notes)
    assert "anchors" not in receipt.costs and receipt.cost <= 0.3
    assert torch.equal(out, attention(q, k, v, small(reconstruction="tail", **dear)))


@pytest.mark.parametrize("reconstruction", SUMMARISED)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_output_is_the_plan_written_out(reconstruction, backend):
    """Kept keys and the summary of what was chosen, row by row in fp64, with exact probe rows."""
    q, k, v = qkv(2, 4, 2, 240, 260, 16, 24)
    config = small(reconstruction=reconstruction, density=0.5, backend=backend)
    work = grouped_call(q, k, v, config.replace(backend="torch"))
    plan = stages(reconstruction, work)
    summary, k_all, v_all = plan.summary, expand_heads(k, 4).double(), expand_heads(v, 4).double()
    wanted = torch.zeros(2, 4, 240, 24, dtype=torch.float64)
    labels = expand_heads(plan.route.kv.labels, 4)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in (2, 4, 240))).tolist():
        a, row = int(plan.route.query.labels[b, h, i]), q[b, h, i].double()
        kept = plan.route.cells[b, h, a][labels[b, h]]
        own, values = summary.keys[b, h, a].double(), summary.values[b, h, a].double()
        more = work.call.scale * own @ row + summary.log_weight[b, h, a].double()
        if summary.drift is not None:
            y = row @ summary.drift.basis[b, h // 2].double() - summary.drift.origin[b, h, a].double()
            more = more + min(float(y.square() @ summary.drift.curve[b, h, a].double()), 0.5)
            values = values + y @ summary.drift.slope[b, h, a].double()
        logits = torch.cat([work.call.scale * k_all[b, h, kept] @ row, more])
        wanted[b, h, i] = logits.softmax(-1) @ torch.cat([v_all[b, h, kept], values])
    dense, _ = masked_attention(q, k, v)
    index = plan.probes.rows[..., None].expand(-1, -1, -1, 24)
    wanted.scatter_(2, index, dense.gather(2, index))
    assert worst(attention(q, k, v, config), wanted) < 2e-5


def test_heads_get_what_they_chose():
    """With drift, without, without a summary, dense: switched off by zeros and -inf, head by head."""
    shape = (1, 4, 3)
    drift = Drift(normal(1, 2, 8, 2), normal(*shape, 2), normal(*shape, 2).abs(), normal(*shape, 2, 5))
    summary = SummaryKeys(normal(*shape, 6, 8), normal(*shape, 6, 5), normal(*shape, 6), drift)
    choice = torch.tensor([[int(choice) for choice in Choice]])
    found = backends()["torch"].switch_summary(summary, choice)
    assert torch.equal(found.log_weight[:, :2], summary.log_weight[:, :2])
    assert (found.log_weight[:, 2:] == -math.inf).all()
    for name in ("curve", "slope"):
        assert torch.equal(getattr(found.drift, name)[:, 0], getattr(drift, name)[:, 0])
        assert not getattr(found.drift, name)[:, 1].any()


def concentrated(spread=6.0):
    """Every query looks at its own key and at next to nothing else."""
    q = spread * normal(1, 2, 700, 32)
    return q, q, normal(1, 2, 700, 32, seed=1)


BUDGET = {"query_groups": 16, "kv_groups": 64, "probes": 16, "summary_slots": 16, "drift_rank": 4, "kmeans_cold": 5}


def test_concentrated_heads_run_plain_and_say_so():
    q, k, v = concentrated()
    config = Config(density=0.3, backend="torch", **BUDGET)
    out, receipt = attention(q, k, v, config, return_receipt=True)
    assert receipt.chosen["without summary"] == 2
    assert any(note.startswith("2 of 2 heads run without a summary") for note in receipt.notes)
    assert out.isfinite().all()


def test_diffuse_heads_run_with_drift_and_gain_much():
    q, k, v = video_like(VideoLike(grid=(4, 12, 16), head_dim=32, concentration=9.0))
    dense, _ = masked_attention(q, k, v)
    config = Config(density=0.3, backend="torch", **BUDGET)
    out, receipt = attention(q, k, v, config, return_receipt=True)
    assert receipt.chosen["with drift"] == 2 and receipt.cost <= 0.3
    dropped = attention(q, k, v, config.replace(reconstruction="none"))
    assert mean_error(out, dense) < 0.5 * mean_error(dropped, dense)
    still = attention(q, k, v, config.replace(drift_rank=0))
    assert mean_error(out, dense) < 1.05 * mean_error(still, dense)


@pytest.mark.parametrize("reconstruction", SUMMARISED)
@pytest.mark.parametrize("concentration", [5.0, 16.5, 25.0, 60.0])
def test_the_summary_never_hurts_what_is_kept(reconstruction, concentration):
    """Against the same cells without a summary; the judge sees few rows, hence the tolerance."""
    q, k, v = video_like(VideoLike(grid=(4, 12, 16), head_dim=32, concentration=concentration))
    dense, _ = masked_attention(q, k, v)
    work = grouped_call(q, k, v, Config(density=0.22, backend="torch", reconstruction=reconstruction, **BUDGET))
    plan = stages(reconstruction, work)
    out, _ = work.backend.attend(q, k, v, plan.route, work.call.scale, plan.summary)
    dropped, _ = work.backend.attend(q, k, v, plan.route, work.call.scale)
    for h in range(2):
        assert mean_error(out[:, h], dense[:, h]) < 1.15 * mean_error(dropped[:, h], dense[:, h])


@pytest.mark.parametrize("reconstruction", SUMMARISED)
def test_without_probes_every_head_takes_the_summary(reconstruction):
    """Nothing is known about the error, and nothing is claimed."""
    q, k, v = qkv(2, 4, 2, 300, 280)
    out, receipt = attention(q, k, v, small(reconstruction=reconstruction, probes=0), return_receipt=True)
    assert receipt.error is None and receipt.chosen == {} and receipt.pairs.probe == 0
    dropped = attention(q, k, v, small(reconstruction="none", probes=0, density=receipt.density))
    dense, _ = masked_attention(q, k, v)
    assert mean_error(out, dense) < mean_error(dropped, dense)


@pytest.mark.parametrize("reconstruction", SUMMARISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_costs_little(reconstruction, dtype):
    q, k, v = qkv(1, 2, 2, 300, 300, dtype=dtype)
    out = attention(q, k, v, small(reconstruction=reconstruction))
    exact = attention(q.float(), k.float(), v.float(), small(reconstruction=reconstruction))
    assert out.dtype == dtype and worst(out, exact.double()) < 4 * torch.finfo(dtype).eps


def test_logits_of_ten_thousand_stay_finite():
    q, k, v = qkv()
    for factor in (30.0, 3000.0):
        for reconstruction in SUMMARISED:
            out, receipt = attention(factor * q, k, v, small(reconstruction=reconstruction), return_receipt=True)
            assert out.isfinite().all() and math.isfinite(receipt.error)

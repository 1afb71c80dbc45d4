"""Every pair counted: against masks, the paper's density identity and its table of probe fractions."""

import dataclasses
import json

import pytest
import torch

from residua import Config, Partition, Route, attention
from residua.method.grouping.partition import group_tokens
from residua.method.inputs import validate
from residua.method.route import route_cells
from residua.method.stages import SizedCall
from residua.ops.backend import Backend
from residua.receipt import Pairs, count_pairs
from residua.util.stopwatch import Stopwatch
from tests.support.making import in_groups
from tests.support.oracle import paper, qkv, random_route, route_mask, small


@pytest.mark.parametrize(
    "model, queries, fraction",
    [
        ("HunyuanVideo", 118_800, "0.054%"),
        ("Wan2.2", 75_600, "0.085%"),
        ("Cosmos-Predict2.5", 84_480, "0.076%"),
        ("Cosmos3-Nano", 44_160, "0.145%"),
    ],
)
def test_probe_fractions_of_the_papers_table(model, queries, fraction):
    tokens = torch.zeros(1, 1, 1, 1).expand(1, 1, queries, 64)
    call = validate(tokens, tokens, tokens)
    probes = SizedCall.of(call, Config.paper(), Backend()).sizes.probes
    one = Partition.from_labels(torch.zeros(1, 1, queries, dtype=torch.long), 1)
    route = Route(one, one, torch.zeros(1, 1, 1, 1, dtype=torch.bool))
    assert probes == 64
    assert f"{count_pairs(call, route, probes).sum().density('probe'):.3%}" == fraction


@pytest.mark.parametrize("density", [0.15, 0.22, 0.6])
def test_executed_density_is_routed_density_plus_probe_share(density):
    """rho_exec = rho_route + M / Nq, with rho_route from its definition over the cells."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, queries=400, keys=350)
    config = paper(density=density)
    _, receipt = attention(q, k, v, config, return_receipt=True)
    call = validate(q, k, v)
    grouping = group_tokens(SizedCall.of(call, config, Backend()))
    route = route_cells(in_groups(call, grouping, config=config.replace(density=density), probes=16)).route
    rho_route = route_mask(route, 400, 350).double().mean((-2, -1))
    assert torch.allclose(receipt.per_head.density("routed").double(), rho_route, atol=1e-6)
    assert torch.allclose(receipt.per_head.density().double(), rho_route + 16 / 400, atol=1e-6)
    assert receipt.density == pytest.approx(float(rho_route.mean()) + 16 / 400, abs=1e-9)
    assert receipt.density <= density == receipt.target


def test_pinned_exact_and_masked_pairs_against_a_mask():
    q, k, v = qkv(batch=2, heads=2, queries=100, keys=120)
    mask = torch.arange(120)[None] < torch.tensor([[120], [112]])
    spans = {"pinned_keys": (100, 116), "exact_queries": [(0, 4), (96, 100)], "key_mask": mask}
    _, receipt = attention(q, k, v, small(density=0.5, probes=6), **spans, return_receipt=True)
    pairs, keys = receipt.per_head, torch.tensor([[120], [112]])
    assert torch.equal(pairs.possible, (100 * keys).expand(2, 2))
    assert torch.equal(pairs.exact, (8 * keys).expand(2, 2))
    assert torch.equal(pairs.probe, (6 * keys).expand(2, 2))
    assert torch.equal(pairs.pinned, (92 * torch.tensor([[16], [12]])).expand(2, 2))
    assert torch.equal(pairs.total, pairs.routed + pairs.probe + pairs.pinned + pairs.exact)
    assert (pairs.total <= (0.5 * pairs.possible)).all() and (pairs.routed > 0).all()


def test_totals_are_sums_over_heads():
    _, receipt = attention(*qkv(batch=2, heads=3), small(), return_receipt=True)
    for part in ("routed", "probe", "pinned", "exact", "possible", "total"):
        total = getattr(receipt.pairs, part)
        assert type(total) is int and total == int(getattr(receipt.per_head, part).sum())
    assert receipt.per_head.routed.shape == (2, 3)


@pytest.mark.parametrize("score, columns", [("mass", 300), ("centroid", 16)])
def test_flops_and_routing_products(score, columns):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, queries=260, keys=300, dim=16, value_dim=24)
    _, receipt = attention(q, k, v, paper(score=score), return_receipt=True)
    assert receipt.routing_products == 2 * 4 * 8 * columns
    per_pair = 2 * 16 + 2 * 24  # a multiplication and an addition per channel of q.k and of p.v
    assert receipt.dense_flops == per_pair * 2 * 4 * 260 * 300
    assert receipt.flops == per_pair * receipt.pairs.total + 2 * 16 * receipt.routing_products


def test_the_receipt_says_what_was_changed():
    _, receipt = attention(
        *qkv(queries=60, dim=12), Config.paper(backend="torch", query_groups=99), return_receipt=True
    )
    notes = " ".join(receipt.notes)
    for name in ("query_groups=99 clamped to 60", "key_rank=48 clamped to 12", "probes=64 clamped to 6"):
        assert name in notes
    _, receipt = attention(*qkv(), small(density=1e-4, probes=0), return_receipt=True)
    assert receipt.density > 1e-4 and "every query group keeps at least one cell" in " ".join(receipt.notes)
    _, receipt = attention(*qkv(queries=400), paper(), return_receipt=True)
    assert receipt.notes == ()


def test_a_single_head_above_the_target_is_said_too():
    """Head 0 needs 40 % of the keys, head 1 needs 55 %: above 50 %, though the mean is not."""
    q, k = torch.zeros(1, 2, 100, 2), torch.zeros(1, 2, 100, 2)
    q[..., 0] = 1
    k[0, 0, :40, 0] = k[0, 1, :50, 0] = k[0, 1, 95:, 0] = 2
    config = small(query_groups=1, kv_groups=2, density=0.5, probes=0, partition="semantic")
    _, receipt = attention(q, k, k, config, return_receipt=True)
    assert receipt.per_head.density().tolist() == [pytest.approx([0.4, 0.55])]
    assert any("above the target 0.5 in 1 of 2 heads" in note for note in receipt.notes)


def test_receipts_are_frozen_and_serialise():
    _, receipt = attention(*qkv(), small(), return_receipt=True, time_stages=True)
    plain = json.loads(json.dumps(receipt.to_dict()))
    assert plain["density"] == receipt.density and plain["pairs"]["total"] == receipt.pairs.total
    assert plain["pairs"]["total"] == sum(plain["pairs"][p] for p in ("routed", "probe", "pinned", "exact"))
    assert sum(plain["densities"].values()) == pytest.approx(receipt.density)
    assert plain["groups"] == [8, 16] and plain["backend"] == "torch" and plain["warm"] is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        receipt.error = 0.0


STAGES = ["budget", "grouping", "routing", "summary", "probes", "attention", "reconstruction", "exact rows"]


@pytest.mark.parametrize("reconstruction", ["none", "probe", "tail", "anchored"])
def test_time_per_stage_only_when_asked(reconstruction):
    q, k, v = qkv()
    config = small(reconstruction=reconstruction)
    assert attention(q, k, v, config, return_receipt=True)[1].timings is None
    timings = attention(q, k, v, config, return_receipt=True, time_stages=True)[1].timings
    assert list(timings.seconds) == STAGES and all(value >= 0 for value in timings.seconds.values())
    assert timings.total == pytest.approx(sum(timings.seconds.values()))


def test_a_clock_adds_up_stages_of_the_same_name(monkeypatch):
    ticks = iter([1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr("residua.util.stopwatch.time.perf_counter", lambda: next(ticks))
    clock = Stopwatch(True, lambda: None)
    for _ in range(2):
        with clock.stage("work"):
            pass
    assert clock.timings.seconds == {"work": 6.0}


def test_density_of_nothing_is_zero():
    assert Pairs(0, 0, 0, 0, 0).density() == 0.0
    empty = torch.zeros(1, 1, dtype=torch.long)
    assert Pairs(empty, empty, empty, empty, empty).density().item() == 0.0


def test_no_route_means_every_pair_was_evaluated():
    call = validate(*qkv(queries=30, keys=40))
    pairs = count_pairs(call, None, 0)
    assert (pairs.exact == 1200).all() and (pairs.density() == 1).all()


def test_routed_pairs_of_a_given_route():
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, queries=90, keys=110)
    route = random_route(2, 4, 2, lowest=-1)
    pairs = count_pairs(validate(q, k, v), route, 3)
    assert torch.equal(pairs.routed, route_mask(route, 90, 110).sum((-2, -1)))
    assert (pairs.probe == 330).all()


def test_a_receipt_is_short_and_compares():
    q, k, v = qkv()
    first, second = (attention(q, k, v, small(), return_receipt=True, time_stages=timed)[1] for timed in (True, False))
    assert first == second and first != attention(q, k, v, small(density=0.6), return_receipt=True)[1]
    assert first != "a receipt"
    text = str(first)
    assert text.startswith("Receipt: cost ") and "estimated error" in text and len(text) < 120


def test_a_large_error_is_noted():
    q, k, v = qkv(1, 2, 2, 400, 400)
    _, receipt = attention(q, k, v, small(density=0.3), return_receipt=True)
    assert receipt.error > 0.2 and any("is large" in note and "max_error" in note for note in receipt.notes)
    _, receipt = attention(q, k, v + 3, small(density=0.3), return_receipt=True)
    assert receipt.error < 0.2 and not any("is large" in note for note in receipt.notes)


def test_exchanged_heads_and_tokens_are_noted():
    q = torch.zeros(1, 300, 4, 8)
    _, receipt = attention(q, q, q, small(), return_receipt=True)
    assert any("[B, N, H, D]" in note and "transpose(1, 2)" in note for note in receipt.notes)

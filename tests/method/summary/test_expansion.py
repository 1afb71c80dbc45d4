"""The expansion around the anchors: exact at an anchor whatever is skipped, exact to first order around
it."""

import math
from dataclasses import replace

import pytest
import torch

from residua import Route, attention
from residua.method.inputs import validate
from residua.method.route import cell_scores
from residua.method.stages import Centres, Routing
from residua.method.summary.centres import centre_mass, find_centres, merge_centres
from residua.method.summary.expansion import assign_slots, directions, drift, expand
from residua.ops import backends
from residua.ops.backend import Backend
from tests.support.making import grouping_of, in_groups, partition, random_cells
from tests.support.oracle import expand_heads, masked_attention, normal, qkv, small, worst

CQ, CK = 5, 9


def at_their_anchors(kv_heads=4, padding=False, pinned=False):
    """A call in which all rows of a query group are the same row, and its grouping."""
    q, k, v = qkv(2, 4, kv_heads, 60, 90, 8, 12)
    labels = torch.randint(0, CQ, (2, 4, 60), generator=torch.Generator().manual_seed(5))
    q = torch.take_along_dim(q[:, :, :CQ], labels[..., None], 2)
    mask = torch.arange(90)[None] < torch.tensor([[90], [71]]) if padding else None
    keys = torch.randint(0, CK, (2, kv_heads, 90), generator=torch.Generator().manual_seed(6))
    if pinned:
        keys[..., 60:75] = CK  # a group of its own, kept by all
    if padding:
        keys = torch.where(mask[:, None], keys, -1)
    call = validate(q, k, v, key_mask=mask, pinned_keys=(60, 75) if pinned else None)
    kv = partition(keys, CK + pinned)
    return call, grouping_of(call, partition(labels, CQ), kv, int(pinned))


def dense(call):
    mask = None if call.key_mask is None else call.key_mask[:, None, None]
    return masked_attention(call.q, call.k, call.v, mask)[0]


def expanded(call, grouping, route, single, merged, rank, backend=None):
    backend = backend or Backend()
    grouped = in_groups(call, grouping, backend, single_slots=single, merged_slots=merged, drift_rank=rank)
    routing = routed(call, route, cell_scores(grouped))
    return expand(grouped, routing, assign_slots(grouped, routing))


def routed(call, route, log_mass, centres=None):
    """A routing after which every head has a summary."""
    return Routing(route, log_mass, torch.zeros(call.q.shape[:2], dtype=torch.bool), centres)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("kv_heads, padding, pinned", [(4, 0, 0), (2, 0, 0), (1, 1, 0), (2, 0, 1), (2, 1, 1)])
@pytest.mark.parametrize("keep", [0.0, 0.4])
def test_a_row_at_its_anchor_gets_the_dense_output(backend, kv_heads, padding, pinned, keep):
    """Whatever is skipped: one slot per group, or several groups in a slot; with drift and without."""
    backend = backends()[backend]
    if backend.unavailable():
        pytest.skip(backend.unavailable())
    call, grouping = at_their_anchors(kv_heads, bool(padding), bool(pinned))
    route = random_cells(grouping, 4, keep, seed=2)
    for single, merged, rank in ((CK + pinned, 0, 0), (CK + pinned, 0, 8), (2, 3, 3), (0, 1, 8)):
        summary = expanded(call, grouping, route, single, merged, rank, backend)
        out, _ = backend.attend(call.q, call.k, call.v, route, call.scale, summary)
        assert worst(out, dense(call)) < 5e-6
    without, _ = backend.attend(call.q, call.k, call.v, route, call.scale)
    assert worst(without, dense(call)) > 0.05


@pytest.mark.parametrize("spans", [{}, {"pinned_keys": (100, 120), "exact_queries": (0, 9)}])
@pytest.mark.parametrize("summary_slots", [4, 16])
def test_a_whole_call_of_equal_rows_is_dense(spans, summary_slots):
    q, k, v = qkv(1, 4, 2, 300, 300, 16)
    q = q[:, :, :1].expand(q.shape)
    out, receipt = attention(
        q, k, v, small(query_groups=1, summary_slots=summary_slots, drift_rank=4), **spans, return_receipt=True
    )
    assert worst(out, masked_attention(q, k, v)[0]) < 1e-5
    assert receipt.density < 0.3 and receipt.chosen["without summary"] == 0 and receipt.error < 1e-5


def scattered(eps, anchor, keys, groups, seed=0):
    """Rows at anchor +- eps * d, so that the anchor is their mean; a kept K/V group of far keys, and
    `groups` that are skipped. All in fp64."""
    dim = anchor.shape[-1]
    off = normal(20, dim, seed=seed + 1, dtype=torch.float64)
    q = anchor + eps * torch.cat([off, -off])
    k = normal(keys, dim, seed=seed + 2, dtype=torch.float64)
    v = normal(keys, 6, seed=seed + 3, dtype=torch.float64) + k @ normal(dim, 6, seed=seed + 4, dtype=torch.float64)
    labels = torch.arange(keys) % (groups + 1)
    k[labels > 0] += 3 * normal(groups, dim, seed=seed + 5, dtype=torch.float64)[labels[labels > 0] - 1]
    call = validate(q[None, None], k[None, None], v[None, None], scale=0.5)
    grouping = grouping_of(call, partition(torch.zeros(1, 1, 40, dtype=torch.long)), partition(labels.view(1, 1, -1)))
    cells = torch.zeros(1, 1, 1, groups + 1, dtype=torch.bool)
    cells[..., 0] = True
    return call, grouping, Route(grouping.query, grouping.kv, cells)


def error_at(eps, rank, anchor, keys=120, groups=1, backend="reference"):
    call, grouping, route = scattered(eps, anchor, keys, groups)
    summary = expanded(call, grouping, route, groups, 0, rank)
    out, lse = backends()[backend].attend(call.q, call.k, call.v, route, call.scale, summary)
    wanted, wanted_lse = masked_attention(call.q, call.k, call.v, scale=call.scale)
    return float((out - wanted).norm()), float((lse - wanted_lse).norm())


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_around_an_anchor_it_is_exact_to_first_order(backend):
    """At the origin all keys weigh the same, so the covariances are those that a derivative asks for."""
    origin = torch.zeros(4, dtype=torch.float64)
    with_drift = [error_at(eps, 4, origin, backend=backend) for eps in (0.2, 0.1, 0.05)]
    without = [error_at(eps, 0, origin, backend=backend) for eps in (0.2, 0.1, 0.05)]
    for near, far in zip(with_drift[1:], with_drift[:-1], strict=True):
        assert near[0] < far[0] / 3.4  # a fourth, for half the distance
        assert near[1] < far[1] / 3.4
    for near, far in zip(without[1:], without[:-1], strict=True):
        assert far[0] / 2.4 < near[0] < far[0] / 1.6  # a half
        assert near[1] < far[1] / 3.4  # the mass is exact to first order without drift
    assert with_drift[-1][0] < 0.2 * without[-1][0]
    assert with_drift[0][1] < 0.5 * without[0][1]  # and the curve takes most of the second


def test_the_curve_is_the_second_order_of_the_mass():
    """Where all keys are one group their coordinates do not correlate: no second order is left."""

    def error(eps, rank):
        call, _, _ = scattered(eps, torch.zeros(4, dtype=torch.float64), 150, 1)
        one = partition(torch.zeros(1, 1, 150, dtype=torch.long))
        grouping = grouping_of(call, partition(torch.zeros(1, 1, 40, dtype=torch.long)), one)
        route = Route(grouping.query, grouping.kv, torch.zeros(1, 1, 1, 1, dtype=torch.bool))
        summary = expanded(call, grouping, route, 1, 0, rank)
        _, lse = backends()["reference"].attend(call.q, call.k, call.v, route, call.scale, summary)
        return float((lse - masked_attention(call.q, call.k, call.v, scale=call.scale)[1]).norm())

    assert error(0.1, 4) < error(0.2, 4) / 6  # an eighth
    assert error(0.1, 4) < 0.1 * error(0.1, 0)


def test_away_from_the_origin_too_where_keys_are_gaussian():
    """There a tilt moves the mean and leaves the covariance."""
    anchor = torch.tensor([0.6, -0.5, 0.3, 0.4], dtype=torch.float64)
    for eps in (0.1, 0.05):
        with_drift, without = (error_at(eps, rank, anchor, keys=6000) for rank in (4, 0))
        assert with_drift[0] < 0.25 * without[0] and with_drift[1] < 0.5 * without[1]


def test_several_slots_share_their_drift_by_mass():
    origin = torch.zeros(4, dtype=torch.float64)
    with_drift, without = (error_at(0.05, rank, origin, keys=2000, groups=5) for rank in (4, 0))
    assert with_drift[0] < 0.3 * without[0]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("padding", [False, True])
def test_coordinates_of_full_rank_keep_every_product(kv_heads, padding):
    call, grouping = at_their_anchors(kv_heads, padding)
    q = call.q + normal(*call.q.shape, seed=9)
    call = validate(q, call.k, call.v, key_mask=call.key_mask)
    grouping = grouping_of(call, grouping.query, grouping.kv)
    to_query, to_key = (x.double() for x in directions(in_groups(call, grouping, drift_rank=8)))
    for b in range(2):
        for h in range(4):
            g = h * kv_heads // 4
            rows = grouping.query.labels[b, h]
            keys = grouping.kv.labels[b, g]
            real = keys >= 0
            q_off = q[b, h].double() - grouping.anchors[b, h, rows].double()
            k_off = call.k[b, g, real].double() - grouping.kv_centroids[b, g, keys[real]].double()
            y_q, y_k = q_off @ to_query[b, g], k_off @ to_key[b, g]
            wanted = call.scale * q_off @ k_off.mT
            assert worst(y_q @ y_k.mT, wanted) < 1e-5
            spread = y_k.mT @ y_k / len(y_k)
            assert torch.allclose(spread, torch.eye(8).double(), atol=1e-2)  # unit variance, uncorrelated


def test_few_coordinates_hold_the_directions_in_which_both_vary():
    """Queries vary in channels 0 and 1, keys in 1 and 2: only 1 makes products differ."""
    q, k = torch.zeros(1, 1, 400, 6), torch.zeros(1, 1, 400, 6)
    q[..., :2], k[..., 1:3] = normal(400, 2), normal(400, 2, seed=1)
    k = k + 1e-3 * normal(*k.shape, seed=2)
    call = validate(q, k, k)
    one = partition(torch.zeros(1, 1, 400, dtype=torch.long))
    grouping = grouping_of(call, one, one)
    to_query, to_key = directions(in_groups(call, grouping, drift_rank=1))
    y = ((q - grouping.anchors) @ to_query) @ ((k - grouping.kv_centroids) @ to_key).mT
    wanted = call.scale * (q - grouping.anchors) @ (k - grouping.kv_centroids).mT
    assert worst(y, wanted.double()) < 0.02


def test_padding_does_not_turn_the_directions():
    """Whatever stands there, and however much of it."""
    call, grouping = at_their_anchors(2, padding=True)
    hidden = ~call.key_mask[:, None, :, None]
    found = []
    for value in (0.0, 1e6, math.nan):
        dirty = validate(call.q, torch.where(hidden, value, call.k), call.v, key_mask=call.key_mask)
        found.append(directions(in_groups(dirty, grouping_of(dirty, grouping.query, grouping.kv), drift_rank=3)))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
    short = validate(call.q[1:], call.k[1:, :, :71], call.v[1:, :, :71])
    cut = grouping_of(short, partition(grouping.query.labels[1:], CQ), partition(grouping.kv.labels[1:, :, :71], CK))
    for x, y in zip(found[0], directions(in_groups(short, cut, drift_rank=3)), strict=True):
        assert torch.allclose(x[1:], y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kept_group_that_is_not_finite_does_not_reach_the_drift_of_the_others(value):
    call, grouping = at_their_anchors(2)
    k, v = call.k.clone(), call.v.clone()
    bad = int((grouping.kv.labels[0, 0] == 3).nonzero()[0])
    k[0, 0, bad, 1], v[0, 0, bad, 2] = value, value
    call = validate(call.q, k, v)
    grouping = grouping_of(call, grouping.query, grouping.kv)
    route = random_cells(grouping, 4, 0.4)
    route.cells[..., 3] = True
    summary = expanded(call, grouping, route, 3, 2, 4)
    for x in (
        summary.keys,
        summary.values,
        summary.drift.curve,
        summary.drift.slope,
        summary.drift.basis,
        summary.drift.origin,
    ):
        assert x.isfinite().all()
    assert not summary.log_weight.isnan().any()


def test_the_simple_tail_is_exact_where_the_keys_of_a_group_are_equal():
    """Each then is what its centroid says; alone in its slot it weighs as many keys as it has."""
    q, k, v = qkv(1, 2, 1, 40, 60, 8, dtype=torch.float32)
    labels = (torch.arange(60) % 6).view(1, 1, 60)
    k = k[:, :, labels[0, 0]]
    call = validate(q, k, v)
    query = partition((torch.arange(40) % 4).expand(1, 2, 40))
    grouping = grouping_of(call, query, partition(labels))
    route = random_cells(grouping, 2, 0.3, seed=1)
    grouped = in_groups(call, grouping, single_slots=6, merged_slots=0)
    centres = find_centres(grouped)
    mass = centre_mass(grouped, centres)
    assert torch.allclose(mass, cell_scores(grouped), atol=1e-4)
    routing = routed(call, route, mass, centres)
    summary = merge_centres(grouped, routing, assign_slots(grouped, routing))
    on = summary.log_weight > -math.inf
    assert torch.allclose(summary.log_weight[on], torch.tensor(math.log(10)), atol=1e-4)
    out, _ = backends()["torch"].attend(q, k, v, route, call.scale, summary)
    assert worst(out, masked_attention(q, k, v)[0]) < 5e-6


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("padding", [False, True])
def test_a_centre_is_exact_for_the_mean_query(backend, padding):
    """Mass and value of every group there, against the keys one by one, in fp64."""
    backend = backends()[backend]
    if backend.unavailable():
        pytest.skip(backend.unavailable())
    call, grouping = at_their_anchors(2, padding=padding)
    centres = find_centres(in_groups(call, grouping, backend))
    for b, h, group in torch.cartesian_prod(*(torch.arange(n) for n in (2, 2, CK))).tolist():
        middle = call.q[b, 2 * h : 2 * h + 2].double().mean((0, 1))
        inside = grouping.kv.labels[b, h] == group
        score = call.scale * call.k[b, h, inside].double() @ middle
        mass = centres.log_size[b, h, group] + call.scale * centres.keys[b, h, group].double() @ middle
        assert float(mass) == pytest.approx(float(score.logsumexp(0)), abs=1e-5)
        expected = score.softmax(0) @ call.v[b, h, inside].double()
        assert torch.allclose(centres.values[b, h, group].double(), expected, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_centres_of_shared_keys_serve_every_head(backend, kv_heads):
    """Masses, slots and summary are those of expanded heads that are given the same centres."""
    backend = backends()[backend]
    if backend.unavailable():
        pytest.skip(backend.unavailable())
    call, grouping = at_their_anchors(kv_heads)
    shares = 4 // kv_heads
    centres = find_centres(in_groups(call, grouping, backend))
    every = Centres(*(expand_heads(x, 4) for x in (centres.keys, centres.values, centres.log_size)))
    expanded_call = validate(call.q, expand_heads(call.k, 4), expand_heads(call.v, 4))
    labels = expand_heads(grouping.kv.labels, 4)
    expanded_grouping = grouping_of(expanded_call, grouping.query, partition(labels, CK))
    assert call.heads_per_kv == shares and expanded_call.heads_per_kv == 1
    found = []
    for one, groups, middle in ((call, grouping, centres), (expanded_call, expanded_grouping, every)):
        grouped = in_groups(one, groups, backend, single_slots=2, merged_slots=3)
        routing = routed(one, random_cells(groups, 4, 0.3, seed=1), centre_mass(grouped, middle), middle)
        slots = assign_slots(grouped, routing)
        found.append((routing.log_mass, slots.index, merge_centres(grouped, routing, slots)))
    (mass, index, shared), (mass_there, index_there, expanded) = found
    assert torch.allclose(mass, mass_there, atol=1e-5) and torch.equal(index, index_there)
    for name in ("keys", "values", "log_weight"):
        torch.testing.assert_close(getattr(shared, name), getattr(expanded, name), rtol=1e-4, atol=1e-5)


def test_an_empty_group_has_a_centre_without_mass():
    call, grouping = at_their_anchors(2)
    more = replace(grouping.kv, offsets=torch.cat([grouping.kv.offsets, grouping.kv.offsets[..., -1:]], -1))
    grouping = grouping_of(call, grouping.query, more)
    centres = find_centres(in_groups(call, grouping))
    assert (centres.log_size[..., -1] == -math.inf).all() and centres.log_size[..., :-1].isfinite().all()
    assert not centres.keys.isnan().any() and not centres.values.isnan().any()


def test_groups_that_share_a_slot_vary_around_each_other():
    """Groups of equal keys do not vary in themselves: their drift is that of their centroids."""
    q, k, v = qkv(1, 1, 1, 40, 60, 8, dtype=torch.float32)
    labels = (torch.arange(60) % 6).view(1, 1, 60)
    call = validate(q, k[:, :, labels[0, 0]], v[:, :, labels[0, 0]])
    grouping = grouping_of(call, partition(torch.zeros(1, 1, 40, dtype=torch.long)), partition(labels))
    nothing = Route(grouping.query, grouping.kv, torch.zeros(1, 1, 1, 6, dtype=torch.bool))
    grouped = in_groups(call, grouping, single_slots=0, merged_slots=1, drift_rank=3)
    routing = routed(call, nothing, cell_scores(grouped))
    found = drift(grouped, assign_slots(grouped, routing))
    _, to_key = directions(grouped)
    y = call.k[0, 0, :6].double() @ to_key[0, 0].double()
    y, value = y - y.mean(0), call.v[0, 0, :6].double() - call.v[0, 0, :6].double().mean(0)
    assert worst(found.slope[0, 0, 0].double(), y.mT @ value / 6) < 1e-5
    assert worst(2 * found.curve[0, 0, 0].double(), y.square().mean(0)) < 1e-5
    grouped = in_groups(call, grouping, single_slots=6, merged_slots=0, drift_rank=3)
    assert drift(grouped, assign_slots(grouped, routing)).slope.abs().max() < 1e-6


def test_the_simple_tail_in_pieces(monkeypatch):
    """Chunks of query groups give what the whole gives, and merged slots hold weighted means of centres."""
    call, grouping = at_their_anchors(2, padding=True)
    route = random_cells(grouping, 4, 0.3, seed=1)
    grouped = in_groups(call, grouping, single_slots=2, merged_slots=2)
    centres = find_centres(grouped)
    mass = centre_mass(grouped, centres)
    routing = routed(call, route, mass, centres)
    slots = assign_slots(grouped, routing)
    whole = merge_centres(grouped, routing, slots)
    monkeypatch.setattr("residua.ops.matrices.CHUNK_BYTES", 1)
    pieces = merge_centres(grouped, routing, slots)
    for name in ("keys", "values", "log_weight"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))
    for scale in (call.scale, -call.scale, 0.0):
        scaled = replace(grouped, call=replace(call, scale=scale))
        around = find_centres(scaled)
        routing = routed(call, route, centre_mass(scaled, around), around)
        there = assign_slots(scaled, routing)
        plain, native = (
            merge_centres(replace(scaled, backend=backends()[name]), routing, there) for name in ("torch", "native")
        )
        for name in ("keys", "values", "log_weight"):
            torch.testing.assert_close(getattr(native, name), getattr(plain, name), rtol=1e-4, atol=1e-4)
    for b, h, a, t in torch.cartesian_prod(*(torch.arange(n) for n in (2, 4, CQ, 4))).tolist():
        inside = (slots.index[b, h, a] == t).nonzero()[:, 0]
        weight = mass[b, h, a, inside].double().softmax(-1)
        for found, source in ((whole.keys, centres.keys), (whole.values, centres.values)):
            expected = weight @ source[b, h // 2, inside].double()
            assert torch.allclose(found[b, h, a, t].double(), expected, atol=1e-5)

"""Slots: who shares an extra key, and that nothing skipped is left out or counted twice."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.method.inputs import validate
from residua.method.route import cell_scores
from residua.method.stages import Routing
from residua.method.summary.expansion import assign_slots, neighbours
from tests.support.making import grouping_of, in_groups, partition, random_cells
from tests.support.oracle import qkv


def made(seed, heads, kv_heads, cq, ck, keep, single, merged, wanted=None):
    q, k, v = qkv(2, heads, kv_heads, 30, 40, 4, seed=seed)
    call = validate(q, k, v)
    generator = torch.Generator().manual_seed(seed)
    query = partition(torch.randint(0, cq, (2, heads, 30), generator=generator), cq)
    kv = partition(torch.randint(-1, ck, (2, kv_heads, 40), generator=generator), ck)
    grouping = grouping_of(call, query, kv)
    route = random_cells(grouping, heads, keep, seed)
    grouped = in_groups(call, grouping, single_slots=single, merged_slots=merged)
    log_mass = cell_scores(grouped)
    wanted = torch.ones(2, heads, dtype=torch.bool) if wanted is None else wanted
    return (route, grouped, log_mass, assign_slots(grouped, Routing(route, log_mass, ~wanted)))


def skipped_cells(route):
    heads, kv_heads = route.cells.shape[1], route.kv.labels.shape[1]
    occupied = route.kv.sizes.repeat_interleave(heads // kv_heads, dim=1)[..., None, :] > 0
    return ~route.cells & occupied & (route.query.sizes[..., None] > 0)


shapes = {
    "seed": st.integers(0, 10_000),
    "kv_heads": st.integers(1, 2),
    "shares": st.integers(1, 2),
    "cq": st.integers(1, 5),
    "ck": st.integers(1, 12),
    "keep": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    "slots": st.integers(1, 12),
}


def halves(slots, ck):
    slots = min(slots, ck)
    return (slots, 0) if slots == ck else (slots // 2, slots - slots // 2)


@given(**shapes)
def test_every_skipped_group_has_one_slot_and_the_masses_add_up(seed, kv_heads, shares, cq, ck, keep, slots):
    single, merged = halves(slots, ck)
    route, _, log_mass, found = made(seed, kv_heads * shares, kv_heads, cq, ck, keep, single, merged)
    skipped = skipped_cells(route)
    assert found.index.dtype == torch.int32 and found.log_mass.shape[-1] == single + merged
    assert ((found.index >= 0) == skipped).all() and (found.index < single + merged).all()
    for t in range(single + merged):
        inside = torch.where(found.index == t, log_mass.double(), -math.inf)
        assert torch.allclose(found.log_mass[..., t].double(), inside.logsumexp(-1), atol=1e-5)
    assert (found.share[~skipped] == 0).all()
    whole = skipped.any(-1).double()
    assert torch.allclose(found.share.double().sum(-1), whole, atol=1e-5)
    wanted = torch.where(skipped, log_mass.double(), -math.inf).softmax(-1)
    assert torch.allclose(found.share[skipped].double(), wanted[skipped], atol=1e-5)


@given(**shapes)
def test_the_heaviest_stay_for_themselves(seed, kv_heads, shares, cq, ck, keep, slots):
    single, merged = halves(slots, ck)
    route, _, log_mass, found = made(seed, kv_heads * shares, kv_heads, cq, ck, keep, single, merged)
    skipped = skipped_cells(route)
    alone = skipped & (found.index < single)
    count = skipped.sum(-1).clamp(max=single)
    assert torch.equal(alone.sum(-1), count)
    for t in range(single):
        assert ((found.index == t).sum(-1) <= 1).all()
    lightest = torch.where(alone, log_mass, math.inf).amin(-1)
    heaviest = torch.where(skipped & ~alone, log_mass, -math.inf).amax(-1)
    assert (heaviest <= lightest).all()


@given(**shapes)
def test_heads_that_are_not_wanted_have_none(seed, kv_heads, shares, cq, ck, keep, slots):
    single, merged = halves(slots, ck)
    wanted = torch.rand(2, kv_heads * shares, generator=torch.Generator().manual_seed(seed)) < 0.5
    args = (seed, kv_heads * shares, kv_heads, cq, ck, keep, single, merged)
    found, everywhere = made(*args, wanted)[-1], made(*args)[-1]
    assert (found.index[~wanted] == -1).all() and (found.share[~wanted] == 0).all()
    assert (found.log_mass[~wanted] == -math.inf).all()
    for name in ("index", "log_mass", "share"):  # and the others are not touched by it
        assert torch.equal(getattr(found, name)[wanted], getattr(everywhere, name)[wanted])


def test_merged_slots_hold_neighbours():
    """Far blobs of K/V centroids are never merged with each other."""
    q, k, v = qkv(1, 1, 1, 30, 60, 4)
    k = k.clone()
    k[..., 0] = 100.0 * (torch.arange(60) % 12 // 4)  # groups 0-3, 4-7 and 8-11 lie together
    call = validate(q, k, v)
    query, kv = (partition((torch.arange(30) % 3).view(1, 1, 30)), partition((torch.arange(60) % 12).view(1, 1, 60)))
    found = neighbours(in_groups(call, grouping_of(call, query, kv), merged_slots=3))[0, 0]
    assert [len(found[4 * i : 4 * i + 4].unique()) for i in range(3)] == [1, 1, 1] and len(found.unique()) == 3


@pytest.mark.parametrize("single, merged", [(7, 0), (3, 2)])
def test_masses_at_the_edge_of_fp32_stay_finite(single, merged):
    route, grouped, log_mass, _ = made(3, 2, 1, 4, 7, 0.3, single, merged)
    dropping = torch.zeros(2, 2, dtype=torch.bool)
    for shift in (-1e4, 1e4):
        found = assign_slots(grouped, Routing(route, log_mass + shift, dropping))
        skipped = skipped_cells(route)
        assert not found.log_mass.isnan().any() and found.share.isfinite().all()
        assert torch.allclose(found.share.sum(-1), skipped.any(-1).float(), atol=1e-3)

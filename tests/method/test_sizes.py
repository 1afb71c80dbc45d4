"""Counts cut to what the tensors allow, with a note per cut; the default group counts."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from residua import Config
from residua.method.inputs import validate
from residua.method.rules import CPU, GPU, Rules
from residua.method.sizes import default_groups, fewer_cells, resolve, summary_groups


def call_of(queries, keys, dim=64, value_dim=None, **spans):
    q = torch.zeros(1, 1, 1, 1).expand(1, 1, queries, dim)
    k = torch.zeros(1, 1, 1, 1).expand(1, 1, keys, dim)
    v = torch.zeros(1, 1, 1, 1).expand(1, 1, keys, value_dim or dim)
    return validate(q, k, v, **spans)


def test_default_groups_at_the_authors_length():
    assert default_groups(75_600, 75_600) == (300, 995)  # they ran 300 and 1000


@pytest.mark.parametrize("tokens", [1, 2, 63, 97, 1025, 4096, 20_000, 150_000])
def test_default_groups_are_never_more_than_the_tokens_and_grow_with_them(tokens):
    cq, ck = default_groups(tokens, tokens)
    more = default_groups(2 * tokens, 2 * tokens)
    assert 1 <= cq <= tokens and 1 <= ck <= tokens
    assert more[0] >= cq and more[1] >= ck


def test_nothing_to_clamp_leaves_no_note():
    sizes = resolve(Config(), call_of(75_600, 75_600), CPU)
    assert sizes.notes == ()
    assert (sizes.key_rank, sizes.query_rank, sizes.residual_rank, sizes.probes) == (48, 64, 16, 64)
    assert (sizes.query_groups, sizes.kv_groups, sizes.metric_rows) == (300, 995, 2048)


def test_every_clamp_leaves_a_note():
    config = Config.paper(query_groups=900, kv_groups=900)
    sizes = resolve(config, call_of(100, 90, dim=24, value_dim=8, exact_queries=(0, 10), pinned_keys=(0, 20)), CPU)
    assert (sizes.query_groups, sizes.kv_groups) == (90, 70)
    assert (sizes.key_rank, sizes.query_rank, sizes.residual_rank) == (24, 24, 8)
    assert sizes.probes == 11  # half of 22 rows' worth of pairs
    for name in ("query_groups=900", "kv_groups=900", "key_rank=48", "query_rank=64", "residual_rank=16", "probes=64"):
        assert any(note.startswith(f"{name} clamped to") for note in sizes.notes), name


def test_calls_that_reconstruct_nothing_take_no_probes():
    call = call_of(5000, 5000)
    assert resolve(Config(reconstruction="none"), call, CPU).probes == 0
    assert resolve(Config(density=1), call, CPU).probes == 0
    assert resolve(Config(probes=0), call, CPU).probes == 0
    assert resolve(Config(density=0.5), call, CPU).probes == 50  # one row in a hundred


@pytest.mark.parametrize("tokens", [300, 888, 3000, 20_000])
def test_more_cells_than_are_worth_it_are_clamped(tokens):
    sizes = resolve(Config(query_groups=tokens, kv_groups=tokens), call_of(tokens, tokens), CPU)
    cells = sizes.query_groups * sizes.kv_groups
    assert 0.9 * max(65_536, tokens**2 / 8) < cells <= max(65_536, tokens**2 / 8)
    for name in ("query_groups", "kv_groups"):
        assert any(f"{name}={tokens} clamped" in note and "longer than dense" in note for note in sizes.notes)
    assert not resolve(Config(density=1), call_of(tokens, tokens), CPU).notes


@pytest.mark.parametrize(
    "groups, left", [((10, 2900), (10, 2900)), ((2900, 1000), (1051, 1000)), ((2900, 2900), (1025, 1025))]
)
def test_the_larger_count_is_cut_first(groups, left):
    assert fewer_cells(*groups, 2900 * 2900) == left


TOKENS = (1, 9, 97, 300, 1025, 4096, 8192, 20_000, 150_000)
DENSITIES = (0.005, 0.03, 0.06, 0.14, 0.3)


@pytest.mark.parametrize("rules", [CPU, GPU], ids=lambda rules: rules.name)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("density", DENSITIES)
def test_counts_of_a_summary_fit_into_the_call(tokens: int, density: float, rules: Rules) -> None:
    cq, ck = summary_groups(tokens, tokens, density, rules)
    assert 1 <= cq <= tokens and 1 <= ck <= tokens
    assert 0 <= rules.summary_rule(tokens, density).rank <= 32 and rules.summary_rule(tokens, density).slots >= 16


@pytest.mark.parametrize("rules", [CPU, GPU], ids=lambda rules: rules.name)
def test_a_summary_never_has_fewer_key_groups_than_the_default(rules: Rules) -> None:
    for tokens in TOKENS:
        for density in DENSITIES:
            assert summary_groups(tokens, tokens, density, rules)[1] >= default_groups(tokens, tokens)[1]


def test_short_calls_at_small_budgets_have_many_small_groups() -> None:
    """The budget of 4,096 tokens at 4 % pays for too few anchors, so centres of small groups serve."""
    small, large = (summary_groups(4096, 4096, density, CPU) for density in (0.04, 0.22))
    assert small[0] > large[0] and small[1] > large[1]
    assert summary_groups(4096, 4096, 0.01, CPU)[0] < small[0]  # which pays for fewer of them


@pytest.mark.parametrize("rules", [CPU, GPU], ids=lambda rules: rules.name)
def test_the_summary_grows_with_the_rows_that_the_budget_pays_for(rules: Rules) -> None:
    found = [rules.summary_rule(8192, rows / 8192) for rows in range(8, 1200, 8)]
    for less, more in pairwise(found):
        assert more.slots >= less.slots and more.rank >= less.rank
    assert found[-1].slots > found[0].slots


def test_probes_follow_the_budget_unless_their_number_is_given():
    call = call_of(4096, 4096)
    found = {d: resolve(Config(density=d), call, CPU) for d in (0.01, 0.04, 0.08, 0.22)}
    counts = [sizes.probes for sizes in found.values()]
    assert counts == sorted(counts) and counts[0] < counts[-1] < 64
    assert all(count <= density * 4096 / 2 for density, count in zip(found, counts, strict=True))
    assert not any(sizes.notes for sizes in found.values())
    assert resolve(Config(density=0.08, probes=64), call, CPU).probes == 64
    assert resolve(Config.paper(density=0.08), call, CPU).probes == 64


@pytest.mark.parametrize("settings", [{}, {"reconstruction": "tail"}])
def test_sizes_follow_what_text_leaves_of_a_fixed_density(settings):
    """865 rows of text beside 8,320 of video take 18 of 22 %."""
    text = {"pinned_keys": (8320, 9185), "exact_queries": (8320, 9185)}
    sizes = resolve(Config(density=0.22, **settings), call_of(9185, 9185, **text), CPU)
    alone = resolve(Config(density=0.11, **settings), call_of(8320, 8320), CPU)  # text takes at most half of it
    assert (sizes.query_groups, sizes.kv_groups) == (alone.query_groups, alone.kv_groups)
    assert (sizes.single_slots, sizes.drift_rank) == (alone.single_slots, alone.drift_rank)
    assert any("above the target 0.22" in note and "0.179" in note for note in sizes.notes)
    few = resolve(Config(density=0.22, **settings), call_of(9185, 9185, pinned_keys=(8320, 8456)), CPU)
    assert not few.notes


@pytest.mark.parametrize("config", [Config.paper(), Config(balance=True), Config(max_error=0.1)])
def test_text_does_not_change_the_sizes_of_other_budgets(config):
    text = {"pinned_keys": (8320, 9185), "exact_queries": (8320, 9185)}
    sizes = resolve(config, call_of(9185, 9185, **text), CPU)
    assert replace(sizes, probes=0) == replace(resolve(config, call_of(8320, 8320), CPU), probes=0)

"""Cell scores against naive sums; the budget: exact, greedy by mass per pair, stable."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua import Config, Partition, attention
from residua.method.grouping.partition import group_tokens
from residua.method.inputs import validate
from residua.method.reconstructions import RECONSTRUCTIONS
from residua.method.route import best_cells, cell_scores, group_priority, pair_budget, route_cells
from residua.method.stages import SizedCall
from residua.ops.backend import Backend
from tests.support.making import grouped_call, grouping_of, in_groups, spend
from tests.support.oracle import normal, qkv, small


def grouped(call, config):
    return group_tokens(SizedCall.of(call, config, Backend()))


def route_of(call, config, probes=0):
    return route_cells(in_groups(call, grouped(call, config), config=config, probes=probes)).route


def greedy(log_share, query_sizes, kv_sizes, budget):
    """One head: best cell of every query group, then cell after cell by mass per pair, if it fits.

    -> cells, cells passed over before the last one that was taken
    """
    cq, ck = log_share.shape
    value = [[float(log_share[a, b]) - math.log(max(1, kv_sizes[b])) for b in range(ck)] for a in range(cq)]
    taken = set()
    for a in range(cq):
        open_cells = [b for b in range(ck) if query_sizes[a] * kv_sizes[b] > 0]
        if open_cells:
            taken.add((a, max(open_cells, key=lambda b: (value[a][b], -b))))
    left = budget - sum(query_sizes[a] * kv_sizes[b] for a, b in taken)
    passed, runs, blocked = 0, 0, False
    for a, b in sorted(
        ((a, b) for a in range(cq) for b in range(ck)), key=lambda cell: (-value[cell[0]][cell[1]], cell)
    ):
        cost = query_sizes[a] * kv_sizes[b]
        if (a, b) in taken or not cost:
            continue
        if cost <= left:
            taken.add((a, b))
            left -= cost
            runs, blocked = (runs + 1, False) if blocked else (runs, False)
        else:
            blocked = True
            passed += 1
    return taken, runs


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(sizes, sizes, st.integers(-5, 400), st.integers(0, 10_000))
def test_spending_is_greedy_and_within_the_budget(query_sizes, kv_sizes, budget, seed):
    log_share = normal(len(query_sizes), len(kv_sizes), seed=seed)
    cells = spend(
        Backend(),
        log_share[None, None],
        torch.tensor(query_sizes)[None, None],
        torch.tensor(kv_sizes)[None, None],
        torch.tensor([[budget]]),
    )[0, 0]
    wanted, runs = greedy(log_share, query_sizes, kv_sizes, budget)
    kept = {tuple(cell) for cell in cells.nonzero().tolist()}
    assert kept <= wanted
    if runs <= 3:  # cells passed over interrupt the spending; it goes on at least three times
        assert kept == wanted
    pairs = sum(query_sizes[a] * kv_sizes[b] for a, b in kept)
    least = [min((s for s in kv_sizes if s), default=0) * size for size in query_sizes]
    rows_served = {a for a, _ in kept}
    assert rows_served == {a for a, size in enumerate(query_sizes) if size and any(kv_sizes)}
    only_one_each = len(kept) == len(rows_served)
    assert pairs <= max(budget, sum(least)) or only_one_each
    assert all(query_sizes[a] and kv_sizes[b] for a, b in kept)


def test_mass_per_pair_decides_not_mass():
    # group 0 holds more mass, group 1 more mass per key: 0.5 / 10 against 0.3 / 2
    log_share = torch.tensor([[0.5, 0.3, 0.2]]).log()[None, None]
    cells = spend(Backend(), log_share, torch.tensor([[[4]]]), torch.tensor([[[10, 2, 50]]]), torch.tensor([[10]]))
    assert cells[0, 0, 0].tolist() == [False, True, False]


def test_a_cell_that_does_not_fit_is_passed_over():
    log_share = torch.tensor([[0.9, 0.09, 0.01]]).log()[None, None]
    kv_sizes = torch.tensor([[[1, 30, 2]]])
    cells = spend(
        Backend(), log_share - torch.tensor([0.0, -5, 0]), torch.tensor([[[2]]]), kv_sizes, torch.tensor([[10]])
    )
    assert cells[0, 0, 0].tolist() == [True, False, True]


def test_cells_that_fitted_before_others_were_taken_are_passed_over():
    """Costs 2, 10, 12, 5, 4, 2, 1 in order of value: each was affordable at first, not all in their turn."""
    kv_sizes = torch.tensor([[[2, 10, 12, 5, 4, 2, 1]]])
    log_share = kv_sizes.log() - torch.arange(7)
    cells = spend(Backend(), log_share[:, :, None], torch.tensor([[[1]]]), kv_sizes, torch.tensor([[17]]))
    assert cells[0, 0, 0].tolist() == [True, True, False, True, False, False, False]
    cells = spend(Backend(), log_share[:, :, None], torch.tensor([[[1]]]), kv_sizes, torch.tensor([[16]]))
    assert cells[0, 0, 0].tolist() == [True, True, False, False, True, False, False]
    cells = spend(Backend(), log_share[:, :, None], torch.tensor([[[1]]]), kv_sizes, torch.tensor([[15]]))
    assert cells[0, 0, 0].tolist() == [True, True, False, False, False, True, True]


def test_equal_scores_go_to_the_lower_index():
    cells = spend(
        Backend(), torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3), 2), torch.full((1, 1, 4), 5), torch.tensor([[59]])
    )
    assert cells[0, 0].tolist() == [[True, True, True, False], [True, False, False, False], [True] + [False] * 3]


def test_one_budget_for_all_query_groups_of_a_head():
    log_share = torch.tensor([[-1.0, -1.1, -1.2], [-9.0, -9.1, -9.2]])[None, None]
    cells = spend(Backend(), log_share, torch.full((1, 1, 2), 3), torch.full((1, 1, 3), 4), torch.tensor([[48]]))
    assert cells[0, 0].tolist() == [[True, True, True], [True, False, False]]


def test_a_nan_score_is_always_kept():
    log_share = normal(1, 1, 3, 5)
    log_share[..., 2] = torch.nan
    cells = spend(Backend(), log_share, torch.full((1, 1, 3), 4), torch.full((1, 1, 5), 4), torch.tensor([[0]]))
    assert cells[0, 0].sum() == 3 and cells[0, 0, :, 2].all()


def test_heads_are_spent_independently():
    log_share, query_sizes, kv_sizes = normal(2, 3, 4, 6), torch.arange(24).view(2, 3, 4) % 5, None
    kv_sizes = torch.arange(36).view(2, 3, 6) % 7
    budget = torch.tensor([[5, 60, 200], [90, 0, 30]])
    together = spend(Backend(), log_share, query_sizes, kv_sizes, budget)
    for b in range(2):
        for h in range(3):
            cut = (slice(b, b + 1), slice(h, h + 1))
            alone = spend(Backend(), log_share[cut], query_sizes[cut], kv_sizes[cut], budget[cut])
            assert torch.equal(alone, together[cut])


@pytest.mark.parametrize("score", ["mass", "centroid"])
def test_scores_against_loops(score):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, queries=60, keys=70, dim=6)
    mask = torch.arange(70)[None].expand(2, -1) < torch.tensor([[70], [50]])
    call = validate(q, k, v, key_mask=mask, scale=0.7)
    grouping = grouped(call, small(query_groups=4, kv_groups=9))
    found = cell_scores(in_groups(call, grouping, config=Config(score=score)))
    for b in range(2):
        for h in range(4):
            for a in range(4):
                rows = q[b, h][grouping.query.labels[b, h] == a].double()
                if not len(rows):
                    continue
                anchor = rows.mean(0)
                for c in range(9):
                    keys = k[b, h // 2][grouping.kv.labels[b, h // 2] == c].double()
                    if not len(keys):
                        assert found[b, h, a, c] == -math.inf
                    elif score == "mass":
                        wanted = math.log(sum(math.exp(0.7 * float(anchor @ key)) for key in keys))
                        assert float(found[b, h, a, c]) == pytest.approx(wanted, abs=1e-4)
                    else:
                        wanted = 0.7 * float(anchor @ keys.mean(0)) + math.log(len(keys))
                        assert float(found[b, h, a, c]) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("density", [0.05, 0.22, 0.5, 0.9])
@pytest.mark.parametrize("score", ["mass", "centroid"])
def test_realised_pairs_stay_within_the_target(density, score):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, queries=310, keys=290)
    call = validate(q, k, v)
    config = small(density=density, score=score)
    grouping = grouped(call, config)
    route = route_of(call, config, probes=5)
    budget = int(density * 310 * 290) - 5 * 290
    best = grouping.kv.sizes.repeat_interleave(2, 1).amax(-1) * 310  # the minimum, at its dearest
    assert (route.pairs <= budget).all() or (route.pairs <= best).all()
    if density >= 0.22:
        assert (route.pairs <= budget).all()
        dearest = grouping.query.sizes.amax(-1) * grouping.kv.sizes.repeat_interleave(2, 1).amax(-1)
        assert (route.pairs > budget - dearest).all()  # nothing that fits is left unspent
    assert (route.cells.any(-1) == (grouping.query.sizes > 0)).all()


def test_too_small_a_budget_leaves_one_cell_per_query_group():
    call = validate(*qkv())
    route = route_of(call, small(density=1e-6))
    assert (route.cells.sum(-1) == (route.query.sizes > 0)).all()


def test_density_one_keeps_everything():
    call = validate(*qkv(queries=130, keys=140))
    assert (route_of(call, small(density=1)).pairs == 130 * 140).all()


def test_pair_budget_pays_probes_exact_rows_and_pinned_keys_first():
    q, k, v = qkv(batch=2, queries=100, keys=200)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[1, 150:] = False  # 40 of the 50 are pinned
    call = validate(q, k, v, pinned_keys=(160, 200), exact_queries=(0, 10), key_mask=mask)
    wanted = [int(0.3 * 100 * 200) - (6 + 10) * 200 - 90 * 40, int(0.3 * 100 * 150) - (6 + 10) * 150 - 90 * 0]
    assert pair_budget(call, 0.3, 6).tolist() == wanted


def test_pinned_groups_are_kept_by_every_query_group():
    q, k, v = qkv(queries=100, keys=120)
    call = validate(q, k, v, pinned_keys=(100, 120))
    route = route_of(call, small(density=0.25))
    assert route.pinned_groups == 1
    assert (route.cells[..., -1] == (route.query.sizes > 0)).all()
    assert (route.cells[..., :-1].any(-1) == (route.query.sizes > 0)).all()


def test_a_query_row_that_is_not_finite_does_not_decide_for_its_group():
    q, k, v = qkv()
    q[0, 0, 7] = torch.nan
    call = validate(q, k, v)
    scores = cell_scores(in_groups(call, grouped(call, small())))
    assert not scores.isnan().any()


def test_labels_permuted_with_the_groups_give_the_same_pairs():
    """Renaming the K/V groups renames the columns of the route and changes nothing else."""
    log_share, names = normal(1, 1, 5, 8), torch.randperm(8, generator=torch.Generator().manual_seed(3))
    query_sizes, kv_sizes = torch.tensor([[[3, 7, 2, 9, 4]]]), torch.tensor([[[5, 1, 8, 3, 9, 2, 6, 4]]])
    budget = torch.tensor([[300]])
    first = spend(Backend(), log_share, query_sizes, kv_sizes, budget)
    second = spend(Backend(), log_share[..., names], query_sizes, kv_sizes[..., names], budget)
    assert torch.equal(first[..., names], second)
    assert Partition.from_labels(torch.zeros(1, 1, 4, dtype=torch.long), 1).groups == 1


def test_a_budget_per_query_group_gives_every_row_as_many_keys():
    q, k, v = qkv(1, 2, 2, 300, 280)
    config = small(density=0.3, budget_scope="query-group", reconstruction="none")
    grouped = grouped_call(q, k, v, config)
    route = RECONSTRUCTIONS["none"].route(grouped).route
    kv_sizes = route.kv.sizes[:, :, None]  # [B, H, 1, Ck]
    seen = (route.cells * kv_sizes).sum(-1)  # [B, H, Cq], keys of a row
    wanted = 0.3 * 280
    scores = cell_scores(grouped)
    worst_kept = torch.where(route.cells, scores, torch.inf).argmin(-1, keepdim=True)
    without_last = seen - kv_sizes.expand_as(route.cells).gather(-1, worst_kept)[..., 0]
    assert (seen >= wanted).all() and (without_last < wanted).all()
    # the best cells of every group: nothing that is skipped scores higher than something kept
    best_skipped = torch.where(route.cells, -torch.inf, scores).amax(-1)
    assert (best_skipped <= torch.where(route.cells, scores, torch.inf).amin(-1)).all()


def test_value_error_scores_a_group_by_mass_and_by_how_its_values_differ():
    q, k, v = qkv(1, 4, 2, 90, 80)
    mask = torch.arange(80)[None] < 70
    grouped = grouped_call(q, k, v, small(reconstruction="none"), key_mask=mask)
    found, plain = (
        cell_scores(replace(grouped, config=grouped.config.replace(score=score)))
        for score in ("value-error", "centroid")
    )
    labels = grouped.grouping.kv.labels
    for h in range(4):
        for b in range(grouped.grouping.kv.groups):
            values = v[0, h // 2][labels[0, h // 2] == b].double()
            if len(values) < 2:  # nothing to differ from
                continue
            spread = (values - values.mean(0)).square().sum(-1).mean().sqrt()
            assert torch.allclose(found[0, h, :, b], plain[0, h, :, b] + spread.log().float(), atol=1e-4)


def test_what_the_authors_package_chooses():
    q, k, v = qkv(1, 2, 2, 400, 400)
    config = Config.authors(query_groups=12, kv_groups=20, probes=16, backend="torch")
    out, receipt = attention(q, k, v, config, return_receipt=True)
    assert out.isfinite().all() and 0.22 <= receipt.density < 0.35  # the crossing cell of every group
    given = Config.authors()
    assert (given.query_groups, given.kv_groups, given.probe_order) == (300, 1000, "largest")
    assert (given.score, given.budget_scope, given.reconstruction) == ("value-error", "query-group", "probe")


def spread_call(spreads):
    """A call whose K/V groups have 64 keys each; keys and values have these standard deviations."""
    labels = torch.arange(len(spreads)).repeat_interleave(64)
    off = torch.tensor(spreads)[labels, None]
    k, v = normal(1, 1, len(labels), 16, seed=1), normal(1, 1, len(labels), 16, seed=2)
    call = validate(normal(1, 2, 32, 16), off * k, off * v)
    query = Partition.from_labels(torch.zeros(1, 2, 32, dtype=torch.long), 1)
    return call, grouping_of(call, query, Partition.from_labels(labels[None, None], len(spreads)))


def test_the_priority_of_a_group_is_what_a_summary_of_it_would_miss():
    spreads = (0.5, 1.0, 2.0, 4.0)
    priority = group_priority(in_groups(*spread_call(spreads)))[0, 0]
    wanted = torch.tensor(spreads).log() * 2  # spread of the keys times spread of the values
    assert torch.allclose(priority.diff(), wanted.diff(), atol=0.25)


def test_of_groups_with_the_same_mass_the_one_with_more_spread_is_kept():
    call, grouping = spread_call((0.5, 2.0, 0.5, 1.0))
    grouped = in_groups(call, grouping)
    priority = group_priority(grouped)
    mass = torch.zeros(1, 2, 1, 4)
    budget = torch.full((1, 2), 2 * 32 * 64)
    scopes = [replace(grouped, config=Config(budget_scope=scope)) for scope in ("head", "query-group")]
    per_head, per_group = (best_cells(scoped, mass, [budget], priority)[0] for scoped in scopes)
    assert per_head[0, 0, 0].tolist() == per_group[0, 0, 0].tolist() == [False, True, False, True]
    for scoped in scopes:
        found = best_cells(scoped, mass, [budget] * 3, priority, 1)
        assert found[:, 0, 0, 0].sum(-1).tolist() == [2, 2, 2]
        assert found[0].equal(per_head) and found[1].equal(found[2])
        assert found[1, 0, 0, 0].tolist() == [True, True, False, False]  # equal masses
    (equal,) = best_cells(grouped, mass, [budget])
    assert equal[0, 0, 0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_the_priority_of_a_group_that_cannot_be_told_is_that_of_a_mean_one(value):
    call, grouping = spread_call((1.0, 1.0, 1.0))
    call.v[0, 0, 64:128] = value
    priority = group_priority(in_groups(call, grouping))[0, 0]
    assert priority.isfinite().all()
    assert priority[[0, 2]].abs().max() < 0.5
    if value != 1e30:  # whose values are all alike
        assert priority[1].abs() < 0.5


def test_masked_keys_have_no_priority():
    call, grouping = spread_call((1.0, 2.0, 3.0))
    labels = grouping.kv.labels.clone()
    labels[..., 10::3] = -1
    kv = Partition.from_labels(labels, 3)
    priority = [group_priority(in_groups(call, grouping_of(call, grouping.query, kv)))]
    call.k[..., 10::3, :], call.v[..., 10::3, :] = torch.nan, 7.0
    again = replace(grouping_of(call, grouping.query, kv), kv_centroids=grouping.kv_centroids)
    priority.append(group_priority(in_groups(call, again)))
    assert torch.equal(*priority)

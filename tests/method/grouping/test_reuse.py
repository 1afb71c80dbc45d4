"""Groups that outlive a call: kept while they fit, renewed where they do not, never across other keys."""

import pytest
import torch

from residua import Config, State, attention
from residua.method.grouping import reuse
from residua.tools.synthetic import VideoLike, video_like

CONFIG = Config(density=0.3, query_groups=8, kv_groups=16, probes=8, backend="torch", regroup_every=4)
GRID = (4, 8, 8)
TOKENS = 256


def call_at(step: float, heads: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return video_like(VideoLike(grid=GRID, heads=heads, head_dim=32, step=step, seed=seed))


def reused(state: State, call: tuple[torch.Tensor, ...], config: Config = CONFIG, **more: object) -> list[bool]:
    _, receipt = attention(*call, config, state, return_receipt=True, **more)  # type: ignore[call-overload]
    heads = receipt.reused_per_head
    return [] if heads is None else heads.flatten().tolist()


def test_groups_are_kept_until_all_are_clustered_again() -> None:
    state, call = State(), call_at(0.0)
    told = [reused(state, call) for _ in range(9)]
    kept, anew = [True, True], []
    assert told == [anew, kept, kept, kept, anew, kept, kept, kept, anew]


def test_one_means_that_every_call_clusters() -> None:
    state, config = State(), CONFIG.replace(regroup_every=1)
    assert [reused(state, call_at(0.0), config) for _ in range(3)] == [[], [], []]


def test_the_paper_clusters_in_every_call() -> None:
    assert Config.paper().regroup_every == 1 and Config.authors().regroup_every == 1


def test_kept_groups_give_what_the_same_groups_gave() -> None:
    """On the same input nothing may change but the centroids' rounding: labels and means are the same."""
    state, call = State(), call_at(0.0)
    config = CONFIG.replace(kmeans_cold=60)
    first = attention(*call, config, state)
    assert reused(state, call, config) == [True, True]
    torch.testing.assert_close(attention(*call, config, state), first, atol=1e-5, rtol=1e-5)


def test_a_head_that_changed_is_clustered_again_alone() -> None:
    state, call, other = State(), call_at(0.0), call_at(0.0, seed=1)
    attention(*call, CONFIG, state)
    mixed = tuple(torch.cat([x[:, :1], y[:, 1:]], dim=1) for x, y in zip(call, other, strict=True))
    out, receipt = attention(*mixed, CONFIG, state, return_receipt=True)
    assert receipt.reused_per_head is not None and receipt.reused_per_head.tolist() == [[True, False]]
    assert receipt.reused == 0.5 and receipt.to_dict()["reused"] == 0.5
    # the head that stayed does not notice what its neighbour did
    alone = State()
    attention(*call, CONFIG, alone)
    torch.testing.assert_close(out[:, :1], attention(*call, CONFIG, alone)[:, :1], atol=0, rtol=0)


def test_renewed_heads_are_those_of_a_warm_call() -> None:
    """Clustered as batch entries of their own, from the same start: the result is that of clustering all."""
    call, other = call_at(0.0, heads=4), call_at(0.0, heads=4, seed=1)
    mixed = tuple(torch.cat([x[:, :2], y[:, 2:]], dim=1) for x, y in zip(call, other, strict=True))
    outs = []
    for every in (4, 1):
        state, config = State(), CONFIG.replace(regroup_every=every)
        attention(*call, config, state)
        outs.append(attention(*mixed, config, state)[:, 2:])
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


def test_a_batch_entry_decides_for_itself() -> None:
    calm, changed = call_at(0.0), call_at(0.0, seed=3)
    both = State()
    attention(*(torch.cat([x, x]) for x in calm), CONFIG, both)
    out = attention(*(torch.cat([x, y]) for x, y in zip(calm, changed, strict=True)), CONFIG, both)
    for entry, call in enumerate((calm, changed)):
        alone = State()
        attention(*calm, CONFIG, alone)
        expected = attention(*call, CONFIG, alone)
        torch.testing.assert_close(out[entry : entry + 1], expected, atol=1e-5, rtol=1e-5)


def test_shared_keys_are_judged_with_all_their_queries() -> None:
    q, k, v = call_at(0.0, heads=4)
    grouped = (q, k[:, ::2], v[:, ::2])
    state = State()
    attention(*grouped, CONFIG, state)
    assert reused(state, grouped) == [True, True]
    changed = q.clone()
    changed[:, :2] = call_at(0.0, heads=4, seed=5)[0][:, :2]
    assert reused(state, (changed, *grouped[1:])) == [False, True]


def test_another_padding_is_another_partition() -> None:
    state, call = State(), call_at(0.0)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask[:, 200:] = False
    assert reused(state, call, key_mask=mask) == []
    assert reused(state, call, key_mask=mask) == [True, True]
    longer = mask.clone()
    longer[:, 200:220] = True
    assert reused(state, call, key_mask=longer) == []  # these keys are in no group of before
    assert reused(state, call) == []


def test_a_mask_that_is_changed_in_place_is_another_mask() -> None:
    state, call = State(), call_at(0.0)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask[:, 200:] = False
    attention(*call, CONFIG, state, key_mask=mask)
    mask[:, 200:220] = True
    assert reused(state, call, key_mask=mask) == []


def test_pinned_keys_stay_in_their_group() -> None:
    state, call = State(), call_at(0.0)
    pinned = {"pinned_keys": (0, 16), "exact_queries": (0, 16)}
    config = CONFIG.replace(density=1.0)
    attention(*call, config, state, **pinned)
    assert reused(state, call, config, **pinned) == [True, True]
    dense = torch.nn.functional.scaled_dot_product_attention(*call)
    torch.testing.assert_close(attention(*call, config, state, **pinned), dense, atol=1e-4, rtol=1e-4)


def test_a_row_that_is_not_finite_makes_its_head_stale() -> None:
    state, (q, k, v) = State(), call_at(0.0)
    attention(q, k, v, CONFIG, state)
    broken = k.clone()
    broken[0, 1] = torch.nan
    assert reused(state, (q, broken, v)) == [True, False]


@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_small_changes_keep_the_error_small(drift: float) -> None:
    errors = {}
    for every in (1, 4):
        state, config = State(), CONFIG.replace(regroup_every=every)
        for step in range(4):
            call = call_at(drift * step)
            out = attention(*call, config, state)
        dense = torch.nn.functional.scaled_dot_product_attention(*call)
        errors[every] = float((out - dense).norm() / dense.norm())
    assert errors[4] < 1.25 * errors[1]


def test_memory_is_a_few_bytes_a_token() -> None:
    state, call = State(), call_at(0.0)
    attention(*call, CONFIG, state)
    labels = 2 * 2 * 2 * TOKENS  # int16, queries and keys of two heads
    assert state.nbytes >= labels
    attention(*call, CONFIG, plain := State(), pinned_keys=None)
    every = State()
    attention(*call, CONFIG.replace(regroup_every=1), every)
    factors = 2 * 32 * (32 + 32) * 4
    assert state.nbytes == plain.nbytes == every.nbytes + labels + factors
    state.reset()
    assert state.nbytes == 0


def test_a_sample_of_few_rows_is_all_of_them() -> None:
    assert reuse.SAMPLE >= TOKENS  # otherwise the tests above would miss rows

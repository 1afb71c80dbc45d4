"""What is carried between calls: warm and cold runs, resets, and shape changes that start cold."""

import pytest
import torch

from residua import State, attention
from residua.method.grouping.reuse import BORROWED_STEPS
from residua.method.inputs import validate
from residua.tools.synthetic import VideoLike, video_like
from residua.types import GroupMemory
from tests.support.oracle import normal, qkv, small


def run(state, *tensors, **more):
    config = more.pop("config", small())
    return attention(*tensors, config, state, return_receipt=True, **more)


def test_the_second_call_is_warm():
    state, tensors = State(), qkv()
    assert not state.warm
    first, cold = run(state, *tensors)
    assert state.warm and not cold.warm
    second, warm = run(state, *tensors)
    assert warm.warm
    assert torch.equal(first, attention(*tensors, small()))  # a state does not change a cold call
    assert second.isfinite().all()


def test_reset_means_cold_and_bit_identical():
    state, tensors = State(), qkv()
    first, _ = run(state, *tensors)
    run(state, *tensors)
    state.reset()
    assert not state.warm
    again, receipt = run(state, *tensors)
    assert not receipt.warm and torch.equal(first, again)


def test_warm_runs_repeat_exactly():
    outs = []
    for _ in range(3):
        state = State()
        for step in range(4):
            q, k, v = qkv(seed=1)
            out, _ = run(state, q + 0.1 * step, k, v)
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    "changed, config",
    [
        (qkv(queries=301), {}),
        (qkv(keys=299), {}),
        (qkv(heads=4), {}),
        (qkv(batch=2), {}),
        (qkv(dim=12), {}),
        (qkv(dtype=torch.bfloat16), {}),
        (qkv(heads=2, kv_heads=1), {}),
        (qkv(), {"partition": "semantic"}),
    ],
)
def test_a_change_of_shape_or_grouping_starts_cold(changed, config):
    state = State()
    run(state, *qkv())
    out, receipt = run(state, *changed, config=small(**config))
    assert not receipt.warm
    assert torch.equal(out, attention(*changed, small(**config)))
    assert run(state, *changed, config=small(**config))[1].warm  # and carries on from there


def test_a_change_of_text_tokens_starts_cold():
    state, tensors = State(), qkv()
    run(state, *tensors)
    assert not run(state, *tensors, pinned_keys=(0, 9))[1].warm
    assert run(state, *tensors, pinned_keys=(0, 9))[1].warm
    assert not run(state, *tensors, pinned_keys=(0, 9), exact_queries=(0, 9))[1].warm


@pytest.mark.parametrize("changed", [{"query_groups": 5}, {"query_groups": 20}, {"kv_groups": 9}, {"kv_groups": 40}])
def test_other_group_counts_go_on_from_what_is_there(changed):
    """Sizes follow the budget, which may differ from step to step: fewer groups start from some of the old
    ones, more from these and some rows."""
    tensors = video_like(VideoLike((4, 8, 16), heads=2, head_dim=16))
    config = small(reconstruction="none", **changed)
    dense = torch.nn.functional.scaled_dot_product_attention(*tensors)
    outs = []
    for _ in range(2):
        state = State()
        run(state, *tensors, config=small(reconstruction="none"))
        out, receipt = run(state, *tensors, config=config)
        assert receipt.warm
        outs.append(out)
    assert torch.equal(*outs)
    groups = state.memory(validate(*tensors), config).centroids
    assert [x.shape[2] for x in groups] == [config.query_groups, config.kv_groups]
    cold = attention(*tensors, config)
    assert float((outs[0] - dense).norm()) < 1.1 * float((cold - dense).norm())


def test_settings_that_do_not_concern_the_groups_stay_warm():
    state, tensors = State(), qkv()
    run(state, *tensors)
    for change in ({"density": 0.5}, {"reconstruction": "none"}, {"probes": 4}, {"score": "centroid"}):
        assert run(state, *tensors, config=small(**change))[1].warm


def test_warm_starts_follow_a_drifting_call():
    """Two warm steps on a call that moved a little find groups about as good as twenty-five cold ones."""
    q, k, v = qkv(queries=600, dim=16)
    moved = [t + 0.05 * normal(*t.shape, seed=50) for t in (q, k, v)]
    dense = torch.nn.functional.scaled_dot_product_attention(*moved)
    config = small(kmeans_cold=25, reconstruction="none")
    state = State()
    run(state, q, k, v, config=config)
    warm, receipt = run(state, *moved, config=config)
    cold = attention(*moved, config)
    assert receipt.warm
    assert (warm - dense).norm() < 1.1 * (cold - dense).norm()


def test_a_call_with_nan_does_not_spoil_the_state():
    state, (q, k, v) = State(), qkv()
    bad = q.clone()
    bad[0, 0, 5] = torch.nan
    run(state, bad, k, v)
    out, receipt = run(state, q, k, v)
    assert receipt.warm and out.isfinite().all()


def test_states_are_independent():
    first, second = State(), State()
    a, b = qkv(seed=1), qkv(seed=2)
    run(first, *a)
    run(second, *b)
    mixed = run(first, *a)[0]
    alone = State()
    run(alone, *a)
    assert torch.equal(mixed, run(alone, *a)[0])


def test_a_state_from_inference_mode_works_outside():
    state, tensors = State(), qkv()
    with torch.inference_mode():
        run(state, *tensors)
    out, receipt = run(state, *tensors)
    assert receipt.warm and out.isfinite().all()


def test_of_the_tokens_it_keeps_two_bytes_each():
    state, (q, k, v) = State(), qkv(dtype=torch.bfloat16)
    run(state, q, k, v)
    memory = next(part for part in vars(state).values() if isinstance(part, GroupMemory))
    kept = {name: t for name, t in vars(memory).items() if torch.is_tensor(t)}
    by_token = {name for name, t in kept.items() if q.shape[2] in t.shape[2:] or k.shape[2] in t.shape[2:]}
    assert by_token == {"query_labels", "kv_labels"}
    assert all(kept[name].dtype == torch.int16 for name in by_token)
    assert memory.query_centroids.dtype == memory.kv_centroids.dtype == torch.bfloat16


def test_a_borrowed_start_clusters_again_from_the_lent_centres():
    tensors, near = qkv(seed=1), qkv(seed=2)
    lender, borrower = State(), State()
    run(lender, *tensors)
    borrower.start_from(lender)
    out, receipt = run(borrower, *near, config=small(kmeans_cold=25))
    assert not receipt.warm and receipt.reused == 0.0  # not the step before
    # the same as a warm start with as many steps, without kept groups
    started = State()
    run(started, *tensors, config=small(regroup_every=1))
    wanted, _ = run(started, *near, config=small(kmeans_warm=BORROWED_STEPS))
    assert not torch.equal(out, attention(*near, small(kmeans_cold=25)))
    assert torch.allclose(out, wanted, atol=1e-6)
    assert run(borrower, *near)[1].warm and run(lender, *tensors)[1].warm


def test_a_borrowed_start_of_another_shape_is_a_cold_one():
    lender, borrower, tensors = State(), State(), qkv(queries=301)
    run(lender, *qkv())
    borrower.start_from(lender)
    out, receipt = run(borrower, *tensors)
    assert not receipt.warm and torch.equal(out, attention(*tensors, small()))


def test_a_warm_state_borrows_nothing():
    lender, state = State(), State()
    run(lender, *qkv(seed=1))
    run(state, *qkv(seed=2))
    state.start_from(lender)
    assert run(state, *qkv(seed=2))[1].warm
    state.reset()
    state.start_from(State())
    assert not state.warm

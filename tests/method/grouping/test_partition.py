"""The partitioners: which coordinates each uses, pinned tokens, padding, warm starts and shared keys."""

import pytest
import torch

from residua import Config, InputError, attention
from residua.method.grouping.partition import PARTITIONERS, Partitioner, group_tokens
from residua.method.inputs import validate
from residua.method.stages import SizedCall
from residua.ops.backend import Backend
from tests.support.oracle import normal, qkv, small


def group(q, k, v, config=None, start=None, **spans):
    config = config or small()
    call = validate(q, k, v, **spans)
    return group_tokens(SizedCall.of(call, config, Backend()), start)


def blobs(tokens, spots, seed):
    """Runs of rows around well separated spots: any sound clustering finds the same groups."""
    return spots[torch.arange(tokens) * len(spots) // tokens] + 0.01 * normal(tokens, spots.shape[1], seed=seed)


def as_sets(labels):
    return {frozenset((labels == g).nonzero()[:, 0].tolist()) for g in labels.unique().tolist()}


def test_the_three_partitioners_are_registered_and_others_refused():
    assert {"response", "key-response", "semantic"} <= set(PARTITIONERS)
    with pytest.raises(InputError, match="partition"):
        Config(partition="nearest")


@pytest.mark.parametrize("partition", ["response", "key-response", "semantic"])
def test_groups_are_found_where_they_are(partition):
    spots = 5 * normal(4, 8, seed=7)
    q, k = blobs(40, spots, 1)[None, None], blobs(48, spots, 2)[None, None]
    found = group(q, k, k, small(partition=partition, query_groups=4, kv_groups=4, kmeans_cold=10))
    assert as_sets(found.kv.labels[0, 0]) == {frozenset(range(12 * i, 12 * i + 12)) for i in range(4)}
    assert as_sets(found.query.labels[0, 0]) == {frozenset(range(10 * i, 10 * i + 10)) for i in range(4)}


def test_keys_that_queries_cannot_tell_apart_share_a_group():
    """Keys differ strongly in a channel that no query looks at, weakly in one that all do."""
    looked_at, ignored = torch.arange(32) % 2, torch.arange(32) // 16
    k = torch.zeros(1, 1, 32, 4)
    k[..., 0], k[..., 1] = looked_at, 50.0 * ignored
    q = torch.zeros(1, 1, 32, 4)
    q[..., 0] = 1 + torch.arange(32) / 32
    config = small(query_groups=2, kv_groups=2, key_rank=2, query_rank=2, probes=0)
    by_response = group(q, k, k, config).kv.labels[0, 0]
    by_activation = group(q, k, k, config.replace(partition="semantic")).kv.labels[0, 0]
    assert as_sets(by_response) == as_sets(looked_at)
    assert as_sets(by_activation) == as_sets(ignored)


def test_queries_are_compared_by_direction_only_under_the_response_partition():
    direction = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])
    length = 10.0 ** (torch.arange(40) // 2 % 3)
    q = (direction[torch.arange(40) % 2] * length[:, None])[None, None]
    k = blobs(40, 3 * torch.eye(4), 3)[None, None]
    config = small(query_groups=2, kv_groups=4, query_rank=3)
    wanted = {frozenset(range(i, 40, 2)) for i in range(2)}
    assert as_sets(group(q, k, k, config).query.labels[0, 0]) == wanted
    for partition in ("semantic", "key-response"):
        other = group(q, k, k, config.replace(partition=partition)).query.labels[0, 0]
        assert as_sets(other) != wanted


def test_semantic_keys_do_not_depend_on_the_queries_and_response_keys_do():
    q, k, v = qkv()
    other = q * torch.linspace(0.01, 5, 16)
    for partition, same in (("semantic", True), ("key-response", False), ("response", False)):
        config = small(partition=partition)
        assert torch.equal(group(q, k, v, config).kv.labels, group(other, k, v, config).kv.labels) == same
    first, second = (group(q, k, v, small(partition=p)) for p in ("key-response", "response"))
    assert torch.equal(first.kv.labels, second.kv.labels)  # they differ in the queries only
    assert not torch.equal(first.query.labels, second.query.labels)


def test_values_do_not_enter_the_partition():
    q, k, v = qkv()
    first, second = group(q, k, v), group(q, k, 100 * v.flip(2))
    assert torch.equal(first.kv.labels, second.kv.labels)
    assert torch.equal(first.query.labels, second.query.labels)


def test_centroids_are_means_in_the_original_space():
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, dim=6)
    found = group(q, k, v, small(key_rank=3, query_rank=3))
    for x, part, centroids in ((q, found.query, found.query_centroids), (k, found.kv, found.kv_centroids)):
        for b in range(2):
            for h in range(x.shape[1]):
                for g in range(part.groups):
                    rows = x[b, h][part.labels[b, h] == g].double()
                    if len(rows):
                        assert torch.allclose(centroids[b, h, g].double(), rows.mean(0), atol=1e-5)


def test_shared_keys_take_the_metric_of_all_their_query_heads():
    """Head 0 looks at channel 0, head 1 at channel 1 and far more strongly: together, channel 1 decides."""
    first, second = torch.arange(64) % 2, torch.arange(64) // 2 % 2
    k = torch.zeros(1, 1, 64, 4)
    k[..., 0], k[..., 1] = first, second
    q = torch.zeros(1, 2, 64, 4)
    q[0, 0, :, 0], q[0, 1, :, 1] = 1.0, 30.0
    config = small(query_groups=2, kv_groups=2, key_rank=2, query_rank=2, probes=0, kmeans_cold=10)
    assert as_sets(group(q, k, k, config).kv.labels[0, 0]) == as_sets(second)
    assert as_sets(group(q.flip(1), k, k, config).kv.labels[0, 0]) == as_sets(second)
    assert as_sets(group(q[:, :1], k, k, config).kv.labels[0, 0]) == as_sets(first)


def test_pinned_keys_padding_and_exact_queries_stand_apart():
    q, k, v = qkv(batch=2, queries=100, keys=120)
    mask = torch.ones(2, 120, dtype=torch.bool)
    mask[1, 110:] = False
    mask[0, 30] = False
    found = group(q, k, v, pinned_keys=[(0, 5), (105, 115)], exact_queries=(90, 100), key_mask=mask)
    pinned = torch.zeros(120, dtype=torch.bool)
    pinned[:5] = pinned[105:115] = True
    for b in range(2):
        assert ((found.kv.labels[b] == 16) == (pinned & mask[b])).all()
        assert ((found.kv.labels[b] == -1) == ~mask[b]).all()
    assert found.pinned_groups == 1 and found.kv.groups == 17
    assert (found.query.labels[..., 90:] == -1).all() and (found.query.labels[..., :90] >= 0).all()
    assert found.coordinates.shape[2] == 90


def test_padding_does_not_move_the_groups():
    q, k, v = qkv(queries=100, keys=130)
    mask = torch.arange(130)[None] < 110
    k_bad = torch.where(mask[:, None, :, None], k, torch.nan)
    alone = group(q, k[:, :, :110], v[:, :, :110])
    padded = group(q, k_bad, v, key_mask=mask)
    assert torch.equal(padded.kv.labels[..., :110], alone.kv.labels)
    assert torch.equal(padded.query.labels, alone.query.labels)


def test_warm_start_continues_from_projected_centroids():
    q, k, v = qkv()
    config = small(kmeans_cold=3, kmeans_warm=2)
    cold = group(q, k, v, config)
    warm = group(q, k, v, config, start=(cold.query_centroids, cold.kv_centroids))
    longer = group(q, k, v, config.replace(kmeans_cold=5))

    # three steps and two more are five: the centres of the coordinates are projected means
    assert torch.equal(warm.kv.labels, longer.kv.labels)
    assert not torch.equal(warm.kv.labels, cold.kv.labels)


def test_a_warm_start_with_nan_centroids_still_groups():
    q, k, v = qkv()
    cold = group(q, k, v)
    broken = torch.full_like(cold.query_centroids, torch.nan), torch.full_like(cold.kv_centroids, torch.nan)
    found = group(q, k, v, start=broken)
    assert (found.query.labels >= 0).all() and (found.kv.labels >= 0).all()


def test_an_empty_group_stays_where_it_was():
    """At its first row after a cold start, at its last centroid after a warm one."""
    spots = torch.tensor([[3.0, 1, 0, 0], [0, 0, 2, 5]])
    k = spots[torch.arange(40) // 20][None, None]  # two kinds of keys for four groups
    config = small(query_groups=2, kv_groups=4, partition="semantic")
    cold = group(k, k, k, config)
    assert cold.kv.sizes[0, 0].tolist() == [20, 0, 20, 0]
    assert torch.equal(cold.kv_centroids[0, 0], spots[[0, 0, 1, 1]])
    start = cold.kv_centroids.clone()
    start[0, 0, 3] = 77.0
    warm = group(k, k, k, config, start=(cold.query_centroids, start))
    assert warm.kv.sizes[0, 0, 3] == 0 and (warm.kv_centroids[0, 0, 3] == 77).all()


def test_a_partitioner_of_ones_own():
    @PARTITIONERS.register
    class Halves(Partitioner):
        name = "first-channel"

        def key_factor(self, sized):
            q, k = sized.call.q, sized.call.k
            return torch.eye(q.shape[-1])[:, :1].expand(*k.shape[:2], -1, -1)

    try:
        q, k, v = qkv()
        found = group(q, k, v, small(partition="first-channel", kv_groups=2, kmeans_cold=20))
        split = [k[0, 0, :, 0][found.kv.labels[0, 0] == g] for g in range(2)]
        assert split[0].max() < split[1].min() or split[1].max() < split[0].min()
        assert attention(q, k, v, small(partition="first-channel")).isfinite().all()
    finally:
        PARTITIONERS.remove("first-channel")

"""The nouns: rows, partitions, routes and probes against naive loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from residua import Partition
from residua.types import Probes, Rows
from tests.support.oracle import normal, random_route, route_mask


@given(st.sets(st.integers(0, 20)), st.integers(0, 3))
def test_rows_take_and_complement_agree_with_a_list(chosen, more):
    total = 21 + more
    ranges = []
    for i in sorted(chosen):
        if ranges and ranges[-1][1] == i:
            ranges[-1] = (ranges[-1][0], i + 1)
        else:
            ranges.append((i, i + 1))
    rows = Rows(tuple(ranges))
    x = torch.arange(total).expand(2, total)
    assert rows.count == len(chosen)
    assert rows.take(x, 1)[0].tolist() == rows.index(x.device).tolist() == sorted(chosen)
    assert rows.complement(total).index(x.device).tolist() == sorted(set(range(total)) - chosen)


def test_one_range_is_a_view():
    x = normal(2, 3, 10, 4)
    assert Rows(((2, 7),)).take(x, 2).data_ptr() == x[:, :, 2:].data_ptr()


@given(st.lists(st.integers(-1, 4), min_size=0, max_size=40))
def test_from_labels_is_a_stable_permutation(labels):
    partition = Partition.from_labels(torch.tensor(labels, dtype=torch.long).view(1, 1, -1), 5)
    wanted = [i for g in (0, 1, 2, 3, 4, -1) for i, label in enumerate(labels) if label == g]
    assert partition.order[0, 0].tolist() == wanted
    assert sorted(partition.order[0, 0].tolist()) == list(range(len(labels)))
    assert partition.sizes[0, 0].tolist() == [labels.count(g) for g in range(5)]
    assert partition.offsets[0, 0, 0] == 0 and partition.groups == 5


@given(st.integers(0, 10_000), st.sampled_from([0, -1]), st.sampled_from([1, 2, 4]))
def test_route_pairs_count_the_pairs_of_the_mask(seed, lowest, kv_heads):
    route = random_route(2, 4, kv_heads, 30, 25, seed=seed, lowest=lowest)
    assert torch.equal(route.pairs, route_mask(route, 30, 25).sum((-2, -1)))


def test_probe_residual_reads_the_rows():
    out, exact = normal(1, 2, 9, 3), normal(1, 2, 2, 3, seed=5)
    probes = Probes(torch.tensor([[[4, 0], [8, 7]]]), torch.ones(1, 2, 2), exact)
    missed, sparse = probes.residual(out)
    for h, rows in enumerate([[4, 0], [8, 7]]):
        for m, row in enumerate(rows):
            assert torch.equal(sparse[0, h, m], out[0, h, row])
            assert torch.equal(missed[0, h, m], exact[0, h, m] - out[0, h, row])

"""K-means against naive Lloyd loops: deterministic, warm starts, empty groups, and it always ends."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.method.grouping import partition as grouping
from residua.ops.backend import Backend
from residua.ops.native import NativeBackend
from tests.support.oracle import normal


def kmeans(*args, **options):
    return grouping.kmeans(*args, backend=Backend(), **options)


GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def whole_numbers(heads, rows, rank, seed=0, spread=20):
    """Integer coordinates: sums and distances are exact in fp32, so ties are real ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-spread, spread, (heads, rows, rank), generator=generator).float()


def lloyd(x, centres, steps, valid=None):
    """One head, fp64, a loop per row: nearest centre (lowest index wins), then means."""
    x, centres = x.double().numpy(), centres.double().numpy().copy()
    valid = np.ones(len(x), bool) if valid is None else valid.numpy()
    for _ in range(steps):
        labels = []
        for row, counts in zip(x, valid, strict=True):
            distances = [float(np.sum((row - centre) ** 2)) for centre in centres]
            labels.append(distances.index(min(distances)) if counts else -1)
        for group in range(len(centres)):
            members = [row for row, label in zip(x, labels, strict=True) if label == group]
            if members:
                centres[group] = np.mean(members, axis=0)
    return labels, centres


@pytest.mark.parametrize("seed", range(4))
def test_one_step_is_lloyds(seed):
    x, start = whole_numbers(3, 60, 4, seed), whole_numbers(3, 7, 4, seed + 100)
    found = kmeans(x, 7, 1, start=start)
    for h in range(3):
        labels, centres = lloyd(x[h], start[h], 1)
        assert found.labels[h].tolist() == labels
        assert np.allclose(found.centres[h].numpy(), centres, rtol=1e-6)
        assert found.sizes[h].tolist() == [labels.count(g) for g in range(7)]


def test_cold_start_is_a_row_of_every_part_of_the_sequence():
    """Where in its part, the golden ratio says."""
    x = whole_numbers(2, 50, 3)
    places = [math.floor((i + i * GOLDEN_RATIO % 1) * 50 / 8) for i in range(8)]
    assert all(50 * i // 8 <= place <= 50 * (i + 1) // 8 for i, place in enumerate(places))
    start = torch.stack([x[:, place] for place in places], 1)
    cold, warm = kmeans(x, 8, 6), kmeans(x, 8, 6, start=start)
    assert torch.equal(cold.labels, warm.labels) and torch.equal(cold.centres, warm.centres)


def test_separated_blobs_converge_to_the_loops_result():
    spots = 40 * normal(5, 6, seed=3)
    x = (spots[torch.arange(200) % 5] + normal(200, 6, seed=4))[None]
    labels, centres = lloyd(x[0], torch.stack([x[0, i * 200 // 5 + i] for i in range(5)]), 10)
    found = kmeans(x, 5, 10, start=torch.stack([x[0, i * 200 // 5 + i] for i in range(5)])[None])
    assert found.labels[0].tolist() == labels
    assert np.allclose(found.centres[0].numpy(), centres, rtol=1e-5)


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 12), st.integers(1, 4))
def test_labels_centres_and_sizes_agree(seed, rows, groups, steps):
    x = whole_numbers(2, rows, 3, seed, spread=3)
    found = kmeans(x, min(groups, rows), steps)
    for h in range(2):
        labels = found.labels[h].tolist()
        assert all(0 <= label < min(groups, rows) for label in labels)
        for group in range(min(groups, rows)):
            members = x[h][found.labels[h] == group].double()
            assert len(members) == found.sizes[h, group] == labels.count(group)
            if len(members):
                assert torch.allclose(found.centres[h, group].double(), members.mean(0), atol=1e-5)


def test_an_empty_group_keeps_its_centre():
    x = whole_numbers(1, 30, 2)
    start = torch.cat([x[:, :2], torch.tensor([[[1e4, 1e4], [-3e4, 5.0]]])], 1)
    found = kmeans(x, 4, 5, start=start)
    assert found.sizes[0, 2:].tolist() == [0, 0]
    assert torch.equal(found.centres[0, 2:], start[0, 2:])


def test_identical_rows_all_join_the_first_group():
    found = kmeans(torch.full((2, 9, 3), 1.5), 4, 3)
    assert not found.labels.any() and found.sizes.tolist() == [[9, 0, 0, 0]] * 2
    assert torch.isfinite(found.centres).all()


def test_rows_that_are_not_valid_have_no_say():
    x = whole_numbers(2, 40, 3)
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.6
    poisoned = torch.where(valid[..., None], x, 1e9)
    found, other = kmeans(x, 5, 4, valid=valid), kmeans(poisoned, 5, 4, valid=valid)
    assert torch.equal(found.labels, other.labels) and torch.equal(found.centres, other.centres)
    assert torch.equal(found.labels >= 0, valid)
    for h in range(2):
        alone = kmeans(x[h, valid[h]][None], 5, 4)  # as if they did not exist, first centres included
        assert torch.equal(alone.labels[0], found.labels[h, valid[h]])


def test_no_valid_row_at_all():
    found = kmeans(normal(1, 6, 2), 3, 4, valid=torch.zeros(1, 6, dtype=torch.bool))
    assert (found.labels == -1).all() and not found.sizes.any() and torch.isfinite(found.centres).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_it_ends_and_stays_finite_whatever_comes_in(value):
    x = whole_numbers(2, 30, 3)
    x[0, 4, 1] = value
    x[1] = value
    start = x[:, :5].clone()
    for found in (kmeans(x, 5, 25), kmeans(x, 5, 2, start=start)):
        assert torch.isfinite(found.centres).all()
        assert ((found.labels >= 0) & (found.labels < 5)).all()
        assert found.sizes.sum(-1).tolist() == [30, 30]
    clean = torch.where(torch.isfinite(x), x, 0.0)
    assert torch.equal(kmeans(x, 5, 25).labels, kmeans(clean, 5, 25).labels)


def test_chunks_do_not_change_the_result(monkeypatch):
    x = whole_numbers(3, 101, 4)
    whole = kmeans(x, 9, 5)
    monkeypatch.setattr("residua.ops.matrices.CHUNK_BYTES", 2000)  # 18 rows at a time
    parts = kmeans(x, 9, 5)
    assert torch.equal(whole.labels, parts.labels) and torch.equal(whole.centres, parts.centres)


def test_repeats_are_bit_identical():
    x = normal(2, 300, 8)
    first = kmeans(x, 20, 25)
    for _ in range(10):
        again = kmeans(x, 20, 25)
        assert torch.equal(first.labels, again.labels) and torch.equal(first.centres, again.centres)


@pytest.mark.parametrize("backend", [Backend(), NativeBackend()], ids=["plain", "native"])
def test_it_ends_when_nothing_changes(backend):
    """Bit by bit what all steps give."""
    x = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(3))
    short = grouping.kmeans(x, 12, 200, backend=backend)
    centres = grouping.kmeans(x, 12, 1, backend=backend).centres
    for _ in range(199):
        labels, centres, sizes = backend.lloyd(x, centres, 1, None)
    assert torch.equal(short.labels, labels) and torch.equal(short.centres, centres)
    assert torch.equal(short.sizes, sizes)


def test_steps_after_the_last_change_are_not_taken(monkeypatch):
    taken, step = [], Backend._lloyd_step

    def counted(self, *given):
        taken.append(1)
        return step(self, *given)

    monkeypatch.setattr(Backend, "_lloyd_step", counted)
    kmeans(normal(1, 200, 4), 6, 1000)
    assert len(taken) < 100

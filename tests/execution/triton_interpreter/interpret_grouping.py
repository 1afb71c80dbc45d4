"""Projection, k-means, group means, permutation and group masses against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import assert_near, generator, ragged, random

from residua.execution import plain
from residua.execution.plain.grouping import RMS_FLOOR
from residua.execution.triton import TritonBackend
from residua.execution.triton.permute import scatter_rows
from residua.execution.triton.sort import sort_labels
from residua.subspace import leading_basis, leading_factor
from residua.types import Partition

BACKEND = TritonBackend()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "dim", "rank", "normalise"), [(97, 96, 48, True), (1, 64, 64, False), (65, 20, 5, True)]
)
def test_projection(dtype, tokens, dim, rank, normalise):
    x, factor = random(2, 3, tokens, dim, dtype=dtype), random(2, 3, dim, rank, seed=1) / dim**0.5
    wanted = x.double() @ factor.double()
    if normalise:
        wanted /= wanted.square().mean(-1, keepdim=True).sqrt().clamp(min=RMS_FLOOR)
    assert_near(BACKEND.project(x, factor, normalise), wanted, torch.float32)


def test_projection_of_strided_views_and_zero_rows():
    packed = random(2, 50, 3, 4, 32)  # fused QKV: [B, N, 3, H, D]
    packed[:, :7] = 0
    x = packed[:, :, 1].transpose(1, 2)  # [B, H, N, D]
    factor = random(2, 4, 32, 16, seed=1)
    got = BACKEND.project(x, factor, True)
    assert torch.equal(got, BACKEND.project(x.contiguous(), factor, True))
    assert torch.equal(got[:, :, :7], torch.zeros_like(got[:, :, :7]))
    sliced = random(1, 1, 50, 64)[..., ::2]
    assert_near(BACKEND.project(sliced, factor[:1, :1], False), sliced @ factor[:1, :1], torch.float32)


@pytest.mark.parametrize(
    ("tokens", "groups", "rank", "masked"), [(130, 7, 48, False), (257, 70, 64, True), (5, 9, 100, True)]
)
def test_kmeans_step(tokens, groups, rank, masked):
    x, centres = random(3, tokens, rank), random(3, groups, rank, seed=1)
    centres[:, -1] = 1e4  # nobody's nearest: stays empty
    valid = torch.rand(3, tokens, generator=generator(2)) < 0.8 if masked else None
    labels, means, sizes = BACKEND.kmeans_step(x, centres, valid)
    distance = torch.cdist(x.double(), centres.double())
    wanted = distance.argmin(-1)
    if valid is not None:
        wanted = torch.where(valid, wanted, -1)
    assert torch.equal(labels, wanted)
    partition = Partition.from_labels(labels[None], groups)
    assert torch.equal(sizes, partition.sizes[0])
    truth = plain.group_means(x.double()[None], partition)[0]
    assert_near(means, torch.where(sizes[..., None] > 0, truth, centres.double()), torch.float32)
    assert torch.equal(means[:, -1], centres[:, -1])
    repeat = BACKEND.kmeans_step(x, centres, valid)
    assert all(torch.equal(a, b) for a, b in zip((labels, means, sizes), repeat, strict=True))


def test_kmeans_ties_take_the_lowest_index_and_nan_stays_in_range():
    x = torch.zeros(1, 33, 16)
    x[0, 4] = torch.nan
    labels, _, sizes = BACKEND.kmeans_step(x, torch.ones(1, 5, 16), None)
    assert torch.equal(labels, torch.zeros_like(labels))
    assert sizes.tolist() == [[33, 0, 0, 0, 0]]


def test_sorting_by_label_is_the_partition():
    labels = ragged(1, 4, 61, 6, loose=True).labels
    partition = Partition.from_labels(labels, 6)
    order, offsets = sort_labels(labels[0], 6)
    assert torch.equal(order, partition.order[0])
    assert torch.equal(offsets, partition.offsets[0])


@pytest.mark.parametrize(("tokens", "groups"), [(2500, 37), (1024, 1), (1, 5)])
def test_sorting_over_several_stretches(tokens, groups):
    labels = torch.randint(-1, groups, (2, tokens), generator=generator(1))
    wanted = Partition.from_labels(labels[None], groups)
    order, offsets = sort_labels(labels, groups)
    assert torch.equal(order, wanted.order[0])
    assert torch.equal(offsets, wanted.offsets[0])
    assert torch.equal(BACKEND.sort_groups(labels[None], groups).order, wanted.order)


@pytest.mark.parametrize(("rows", "groups", "rank"), [(70, 5, 32), (130, 64, 128), (9, 3, 20)])
def test_a_small_clustering_in_one_launch_is_that_of_single_steps(rows, groups, rank):
    x, centres = random(2, rows, rank), random(2, groups, rank, seed=1)
    x[0, 3] = torch.nan  # counts as 0
    centres[:, -1] = 1e4  # nobody's nearest
    labels, means, sizes = BACKEND.lloyd(x, centres, 3, None)
    wanted_centres = centres
    for _ in range(3):
        wanted, wanted_centres, wanted_sizes = plain.kmeans_step(x.nan_to_num(nan=0.0), wanted_centres, None)
    assert torch.equal(labels, wanted)
    assert torch.equal(sizes, wanted_sizes)
    assert_near(means, wanted_centres, torch.float32)


@pytest.mark.parametrize(("dim", "rank"), [(48, 32), (20, 5)])
def test_leading_space(dim, rank):
    """As much of the energy as the fp64 iteration finds, and nearly the same factor, up to a rotation."""
    x = random(1, 2, 300, dim) * torch.linspace(2, 0.05, dim)
    metric = (x.mT @ x / 300).double()
    basis, wanted = BACKEND.leading_basis(metric, rank), leading_basis(metric, rank)
    eye = torch.eye(rank, dtype=basis.dtype)
    torch.testing.assert_close(basis.mT @ basis, eye.expand(1, 2, -1, -1), atol=2e-5, rtol=0)
    held, best = ((b.mT @ metric @ b).diagonal(dim1=-2, dim2=-1).sum(-1) for b in (basis, wanted))
    torch.testing.assert_close(held, best, atol=0, rtol=5e-3)  # directions near the last one may be exchanged
    factor, truth = BACKEND.leading_factor(metric, rank).double(), leading_factor(metric, rank).double()
    off = (factor @ factor.mT - truth @ truth.mT).norm(dim=(-2, -1)) / (truth @ truth.mT).norm(dim=(-2, -1))
    assert off.max() < 6e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True])
def test_second_moment(dtype, centred):
    x = random(2, 2, 70, 96, dtype=dtype) + 1
    counted = torch.rand(2, 2, 70, generator=generator(1)) < 0.8
    x[0, 0, 5], x[0, 1, 6, 3] = torch.nan, torch.inf
    for mask in (None, counted):
        got = BACKEND.second_moment(x, mask, centred)
        assert got.dtype == torch.float64
        assert_near(got, plain.second_moment(x, mask, centred), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_group_means(dtype):
    x = random(2, 3, 203, 96, dtype=dtype)
    partition = ragged(2, 3, 203, 9, loose=True)
    assert partition.sizes[0, 0, 2] == 0
    got = BACKEND.group_means(x, partition)
    assert_near(got, plain.group_means(x.double(), partition), torch.float32)
    assert torch.equal(got[:, :, 2], torch.zeros_like(got[:, :, 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gather_and_scatter(dtype):
    x = random(2, 77, 3, 96, dtype=dtype).transpose(1, 2)
    order = ragged(2, 3, 77, 5).order
    moved = BACKEND.gather_rows(x, order)
    assert moved.is_contiguous()
    assert torch.equal(moved, plain.gather_rows(x, order))
    assert torch.equal(scatter_rows(moved, order), x)
    few = order[..., :11]
    assert torch.equal(BACKEND.gather_rows(x, few), plain.gather_rows(x, few))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 64), (4, 2, 96)])
def test_cell_mass(dtype, heads, kv_heads, dim):
    anchors, k = random(2, heads, 67, dim), random(2, kv_heads, 210, dim, dtype=dtype, seed=1)
    kv = ragged(2, kv_heads, 210, 11, loose=True)
    logits = anchors.double() @ k.double().repeat_interleave(heads // kv_heads, 1).mT * 0.2
    labels = kv.labels.repeat_interleave(heads // kv_heads, 1)[:, :, None]
    wanted = torch.stack([logits.masked_fill(labels != g, -torch.inf).logsumexp(-1) for g in range(11)], -1)
    got = BACKEND.cell_mass(anchors, k, kv, 0.2)
    assert torch.equal(got[..., 2], torch.full_like(got[..., 2], -torch.inf))
    assert_near(got, wanted, torch.float32)


def test_empty_inputs_launch_nothing():
    assert BACKEND.project(random(1, 2, 0, 8), random(1, 2, 8, 4), True).shape == (1, 2, 0, 4)
    assert BACKEND.gather_rows(random(0, 2, 3, 8), torch.empty(0, 2, 3, dtype=torch.long)).shape == (
        0,
        2,
        3,
        8,
    )


@pytest.mark.parametrize(("cq", "ck", "density"), [(5, 11, 0.3), (40, 70, 0.1), (3, 9, 0.0), (7, 300, 0.9)])
def test_budgets_are_spent_as_the_plain_version_does(cq, ck, density):
    share = random(2, 3, cq, ck).log_softmax(-1)
    share[0, 1, 2, 3], share[1, 2] = torch.nan, -torch.inf
    query_sizes = torch.randint(0, 40, (2, 3, cq), generator=generator(1))
    kv_sizes = torch.randint(0, 30, (2, 3, ck), generator=generator(2))
    kv_sizes[..., -1] = 500  # a cell that rarely fits
    total = query_sizes.sum(-1) * kv_sizes.sum(-1)
    budgets = torch.stack([(density * total).long(), (0.7 * density * total).long() - 5])
    got = BACKEND.spend_each(share, query_sizes, kv_sizes, list(budgets))
    assert got.dtype == torch.bool
    for cells, budget in zip(got, budgets, strict=True):
        assert torch.equal(cells, plain.spend(share, query_sizes, kv_sizes, budget))

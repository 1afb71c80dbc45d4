"""Projection, k-means, group means, permutation and group masses against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import assert_near, generator, ragged, random

from residua.ops.backend import Backend
from residua.ops.constants import MIN_RMS
from residua.ops.reference import Reference
from residua.ops.subspace import leading_basis, leading_factor
from residua.ops.triton import TritonBackend
from residua.ops.triton.shapes import imagined_gpu
from residua.ops.triton.sort import sort_labels
from residua.types import Partition

BASE = Backend()

BACKEND = TritonBackend()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "dim", "rank", "normalise"), [(97, 96, 48, True), (1, 64, 64, False), (65, 20, 5, True)]
)
def test_projection(dtype, tokens, dim, rank, normalise):
    x, factor = random(2, 3, tokens, dim, dtype=dtype), random(2, 3, dim, rank, seed=1) / dim**0.5
    wanted = x.double() @ factor.double()
    if normalise:
        wanted /= wanted.square().mean(-1, keepdim=True).sqrt().clamp(min=MIN_RMS)
    assert_near(BACKEND.project(x, factor, normalise), wanted, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_coordinates_keep_as_many_digits_as_their_rows(dtype):
    x, factor = random(1, 2, 70, 64, dtype=dtype), random(1, 2, 64, 48, seed=1) / 8
    x[0, 0, 3], x[0, 1, 5] = torch.nan, 6e4
    got = BACKEND.project(x, factor, False, rough=True)
    assert got.dtype == (torch.float32 if dtype == torch.float32 else torch.float16)
    wanted = x.double() @ factor.double()
    if dtype != torch.float32:
        wanted = wanted.nan_to_num(nan=0.0).clamp(-6e4, 6e4)
    fine = wanted.isfinite()
    assert torch.equal(fine, got.isfinite())
    limit = 1e-5 if dtype == torch.float32 else 2**-11
    torch.testing.assert_close(got.double()[fine], wanted[fine], atol=2e-5, rtol=limit)


@pytest.mark.parametrize("groups", [7, 70])
def test_kmeans_of_coordinates_in_fp16(groups):
    x, centres = random(2, 130, 48).half(), random(2, groups, 48, seed=1)
    labels, means, sizes = BACKEND.lloyd(x, centres, 1, None)
    assert torch.equal(labels, torch.cdist(x.double(), centres.double()).argmin(-1))
    wanted = BASE.group_means(x.double()[None], Partition.from_labels(labels[None], groups))[0]
    assert_near(means, torch.where(sizes[..., None] > 0, wanted, centres.double()), torch.float32)


def test_centres_of_coordinates_in_fp16_are_rounded_as_they_are():
    """Far from 0, where rounding moves them most: the nearest of the rounded centres is found exactly."""
    centres = random(1, 70, 48, seed=1) / 8 + 5
    x = (random(1, 130, 48) / 8 + 5).half()
    labels, _, _ = BACKEND.lloyd(x, centres, 1, None)
    rounded = torch.cdist(x.double(), centres.half().double())
    assert (rounded.gather(-1, labels[..., None])[..., 0] - rounded.amin(-1)).max() < 1e-5
    exact = torch.cdist(x.double(), centres.double())
    moved = (centres - centres.half().float()).norm(dim=-1).max()
    assert (exact.gather(-1, labels[..., None])[..., 0] - exact.amin(-1)).max() < 2 * moved < 0.03


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
    labels, means, sizes = BACKEND.lloyd(x, centres, 1, valid)
    distance = torch.cdist(x.double(), centres.double())
    wanted = distance.argmin(-1)
    if valid is not None:
        wanted = torch.where(valid, wanted, -1)
    assert torch.equal(labels, wanted)
    partition = Partition.from_labels(labels[None], groups)
    assert torch.equal(sizes, partition.sizes[0])
    truth = BASE.group_means(x.double()[None], partition)[0]
    assert_near(means, torch.where(sizes[..., None] > 0, truth, centres.double()), torch.float32)
    assert torch.equal(means[:, -1], centres[:, -1])
    repeat = BACKEND.lloyd(x, centres, 1, valid)
    assert all(torch.equal(a, b) for a, b in zip((labels, means, sizes), repeat, strict=True))


def test_kmeans_ties_take_the_lowest_index_and_nan_stays_in_range():
    x = torch.zeros(1, 33, 16)
    x[0, 4] = torch.nan
    labels, _, sizes = BACKEND.lloyd(x, torch.ones(1, 5, 16), 1, None)
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
@pytest.mark.parametrize("arch", [90, 89])
def test_a_small_clustering_in_one_launch_is_that_of_single_steps(arch, rows, groups, rank):
    x, centres = random(2, rows, rank), random(2, groups, rank, seed=1)
    x[0, 3] = torch.nan  # counts as 0
    centres[:, -1] = 1e4  # nobody's nearest
    with imagined_gpu(arch):
        labels, means, sizes = BACKEND.lloyd(x, centres, 3, None)
    wanted_centres = centres
    for _ in range(3):
        wanted, wanted_centres, wanted_sizes = BASE._lloyd_step(x.nan_to_num(nan=0.0), wanted_centres, None)
    assert torch.equal(labels, wanted)
    assert torch.equal(sizes, wanted_sizes)
    assert_near(means, wanted_centres, torch.float32)


@pytest.mark.parametrize(("dim", "rank"), [(48, 32), (20, 5)])
def test_leading_space(dim, rank):
    """The same products as the fp64 iteration, so the same space whether it has converged or not: what is
    left is the rounding of fp32, at a condition of a few thousand."""
    x = random(1, 2, 300, dim) * torch.linspace(2, 0.05, dim)
    metric = (x.mT @ x / 300).double()
    basis, wanted = BACKEND._leading_basis(metric, rank), leading_basis(metric, rank)
    eye = torch.eye(rank, dtype=basis.dtype)
    torch.testing.assert_close(basis.mT @ basis, eye.expand(1, 2, -1, -1), atol=2e-5, rtol=0)
    held, best = ((b.mT @ metric @ b).diagonal(dim1=-2, dim2=-1).sum(-1) for b in (basis, wanted))
    torch.testing.assert_close(held, best, atol=0, rtol=1e-5)
    factor, truth = BACKEND.leading_factor(metric, rank, exact=False).double(), leading_factor(metric, rank).double()
    off = (factor @ factor.mT - truth @ truth.mT).norm(dim=(-2, -1)) / (truth @ truth.mT).norm(dim=(-2, -1))
    assert off.max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True])
def test_second_moment(dtype, centred):
    x = random(2, 2, 70, 96, dtype=dtype) + 1
    counted = torch.rand(2, 2, 70, generator=generator(1)) < 0.8
    x[0, 0, 5], x[0, 1, 6, 3] = torch.nan, torch.inf
    for mask in (None, counted):
        got = BACKEND.second_moment(x, mask, centred)
        assert got.dtype == torch.float64
        assert_near(got, BASE.second_moment(x, mask, centred), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_group_means(dtype):
    x = random(2, 3, 203, 96, dtype=dtype)
    partition = ragged(2, 3, 203, 9, loose=True)
    assert partition.sizes[0, 0, 2] == 0
    got = BACKEND.group_means(x, partition)
    assert_near(got, BASE.group_means(x.double(), partition), torch.float32)
    assert torch.equal(got[:, :, 2], torch.zeros_like(got[:, :, 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_keep_the_rows_they_have_sorted(dtype):
    x, partition = random(2, 3, 103, 48, dtype=dtype), ragged(2, 3, 103, 9, loose=True)
    with BACKEND.session() as backend:
        means = backend.group_means(x, partition, keep=True)
        rows = backend.group_major(x, partition)
    assert torch.equal(means, BACKEND.group_means(x, partition))
    sorted_rows = BASE.gather_rows(x, partition.order)
    for b in range(2):
        for h in range(3):
            count = int(partition.offsets[b, h, -1])  # what belongs to no group is not kept
            assert torch.equal(rows[b, h, :count, :48], sorted_rows[b, h, :count])
            assert not rows[b, h, :count, 48:].any()
    assert torch.equal(BACKEND.group_means(x, partition, keep=True), means)  # also outside of a call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_channels_that_are_lost(dtype):
    """Whether they were seen on the way or are looked for at the end; padding does not count."""
    v = random(2, 2, 103, 48, dtype=dtype)
    v[0, 1, 7, 3], v[1, 0, 100, 47], v[0, 0, 50, 5] = torch.nan, -torch.inf, torch.inf
    mask = torch.ones(2, 103, dtype=torch.bool)
    mask[0, 50] = False
    labels = torch.where(mask[:, None], torch.arange(103) % 5, -1).expand(2, 2, 103)
    kv = Partition.from_labels(labels, 5)
    wanted = torch.zeros(2, 2, 48, dtype=torch.bool)
    wanted[0, 1, 3] = wanted[1, 0, 47] = True
    assert torch.equal(BACKEND.lost_channels(v, mask), wanted)
    assert BACKEND.lost_channels(v, None)[0, 0, 5]
    with BACKEND.session() as backend:
        backend.group_major(v, kv, values=True)
        v.zero_()  # what is known is not looked for again
        assert torch.equal(backend.lost_channels(v, mask), wanted)
    assert not BACKEND.lost_channels(v, mask).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gather(dtype):
    x = random(2, 77, 3, 96, dtype=dtype).transpose(1, 2)
    order = ragged(2, 3, 77, 5).order
    moved = BACKEND.gather_rows(x, order)
    assert moved.is_contiguous()
    assert torch.equal(moved, BASE.gather_rows(x, order))
    few = order[..., :11]
    assert torch.equal(BACKEND.gather_rows(x, few), BASE.gather_rows(x, few))


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
    assert BACKEND.gather_rows(random(0, 2, 3, 8), torch.empty(0, 2, 3, dtype=torch.long)).shape == (0, 2, 3, 8)


@pytest.mark.parametrize(("cq", "ck", "density"), [(5, 11, 0.3), (40, 70, 0.1), (3, 9, 0.0), (7, 300, 0.9)])
def test_budgets_are_spent_as_the_plain_version_does(cq, ck, density):
    share = random(2, 3, cq, ck).log_softmax(-1)
    share[0, 1, 2, 3], share[1, 2] = torch.nan, -torch.inf
    query_sizes = torch.randint(0, 40, (2, 3, cq), generator=generator(1))
    kv_sizes = torch.randint(0, 30, (2, 3, ck), generator=generator(2))
    kv_sizes[..., -1] = 500  # a cell that rarely fits
    total = query_sizes.sum(-1) * kv_sizes.sum(-1)
    budgets = torch.stack([(density * total).long(), (0.7 * density * total).long() - 5])
    got = BACKEND.best_cells(share, query_sizes, kv_sizes, list(budgets), shares=True)
    assert got.dtype == torch.bool
    for cells, budget in zip(got, budgets, strict=True):
        assert torch.equal(cells, BASE.best_cells(share, query_sizes, kv_sizes, [budget], shares=True)[0])


@pytest.mark.parametrize("spread", [1e-3, 0.0])
def test_a_budget_that_overflows_among_many_cells_of_the_same_priority(spread):
    """More cells in one bucket than are looked at together, and overflows one after the other in it."""
    share = spread * random(1, 1, 30, 90)
    share[..., ::7] -= 3.0
    query_sizes = torch.randint(1, 40, (1, 1, 30), generator=generator(1))
    kv_sizes = torch.full((1, 1, 90), 16)
    budgets = [torch.full((1, 1), int(part * 16 * 90 * query_sizes.sum()) + 7) for part in (0.3, 0.61)]
    got = BACKEND.best_cells(share, query_sizes, kv_sizes, budgets, shares=True)
    for cells, budget in zip(got, budgets, strict=True):
        assert torch.equal(cells, BASE.best_cells(share, query_sizes, kv_sizes, [budget], shares=True)[0])
        spent = (cells * query_sizes[..., None] * kv_sizes[..., None, :]).sum()
        assert budget - spent < 16 * query_sizes.max()


def test_buckets_follow_priority():
    """All of them, from infinity to minus infinity, and around their borders."""
    edges = torch.cat([torch.arange(-192, 193) / 128, torch.arange(-180, 180) / 8]) - 7.7  # about -log(count)
    odd = torch.tensor([torch.nan, 40.0, -90.0, -torch.inf])
    log_share = torch.cat([odd, edges, edges + 1e-6, edges - 1e-6])
    log_share = log_share[None, None, None]
    count = log_share.shape[-1]
    ones = torch.ones(1, 1, count, dtype=torch.long)
    for budget in (1, 700, count // 2, count):
        given = (log_share, ones[..., :1], ones, [torch.full((1, 1), budget)])
        assert torch.equal(BACKEND.best_cells(*given, shares=True), BASE.best_cells(*given, shares=True))


@pytest.mark.parametrize(("cq", "ck", "pinned"), [(5, 11, 0), (7, 300, 1), (3, 1100, 1)])
@pytest.mark.parametrize("weighed", [0, 1, 2, None])
def test_cells_by_their_mass(cq, ck, pinned, weighed):
    """Masses in, cells out: as the plain version, broken groups and pinned ones included, for budgets that
    count the priority of K/V groups and for those that do not."""
    mass = 3 * random(2, 2, cq, ck)
    mass[0, 1, :, 3], mass[1, 0, 2], mass[0, 0, :, 4] = torch.nan, -torch.inf, -torch.inf
    query_sizes = torch.randint(0, 40, (2, 2, cq), generator=generator(1))
    kv_sizes = torch.randint(0, 30, (2, 2, ck), generator=generator(2))
    kv_sizes[0, :, 4] = 0
    total = query_sizes.sum(-1) * kv_sizes.sum(-1)
    budgets = [total // 3, total // 9]
    priority = None if weighed == 0 else random(2, 2, ck, seed=3)
    given = (mass, query_sizes, kv_sizes, budgets, ck - pinned, priority, weighed)
    got, wanted = BACKEND.best_cells(*given), Reference().best_cells(*given)
    assert got.shape == (2, 2, 2, cq, ck - pinned)
    # a cell whose priority rounds to that of another may stand before or behind it
    assert (got != wanted).double().mean() <= 2 / wanted[0].numel()
    assert got[:, 0, 1, :, 3].equal(wanted[:, 0, 1, :, 3])
    cells = torch.rand(2, *mass.shape, generator=generator(3)) < 0.5
    missed = BACKEND.missed_mass(mass, cells)
    torch.testing.assert_close(missed, Reference().missed_mass(mass, cells), equal_nan=True)


@pytest.mark.parametrize(("ck", "single", "merged"), [(30, 4, 5), (130, 32, 32), (20, 20, 0), (9, 4, 5)])
def test_slots_are_those_of_the_plain_version(ck, single, merged):
    """Slots of single groups may be numbered otherwise; what they hold is the same."""
    mass, cells = 4 * random(2, 4, 6, ck), torch.rand(2, 4, 6, ck, generator=generator(1)) < 0.3
    mass[0, 0, 1, :5] = 1.5  # ties: the first ones win
    mass[0, 1, 2, :4] -= 200.0  # next to nothing beside the others, and still a slot of its own weight
    query, kv = ragged(2, 4, 90, 6), ragged(2, 2, 200, ck, seed=2)
    near = torch.randint(0, max(1, merged), (2, 2, ck), generator=generator(3))
    wanted = torch.tensor([[True, True, False, True]] * 2)
    given = (mass, cells, query, kv, near, single, merged, wanted)
    got, truth = BACKEND.choose_slots(*given), Reference().choose_slots(*given)
    for index, slot_mass, share in (got, truth):
        assert index.dtype == torch.int32
        assert slot_mass.shape[-1] == single + merged
        assert torch.equal(index[:, 2], torch.full_like(index[:, 2], -1))
        assert not share[:, 2].any()
    assert torch.equal(got[0] >= 0, truth[0] >= 0)
    alone = [(x[0] >= 0) & (x[0] < single) for x in (got, truth)]
    assert torch.equal(*alone)
    assert torch.equal(*(torch.where(a, -1, x[0]) for a, x in zip(alone, (got, truth), strict=True)))
    masses = [torch.cat([x[1][..., :single].sort(-1)[0], x[1][..., single:]], -1) for x in (got, truth)]
    torch.testing.assert_close(*masses, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[2], truth[2], atol=1e-6, rtol=1e-4)
    again = BACKEND.choose_slots(*given)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("every", [1, 4, 9])
@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim"), [(torch.float32, 20, 40), (torch.float16, 96, 64), (torch.bfloat16, 64, 64)]
)
def test_the_priority_of_groups(dtype, dim, value_dim, every):
    """Empty groups, groups without a pair, padding, and groups whose spread is not finite count as a mean
    one."""
    k = random(2, 150, 2, dim, dtype=dtype).transpose(1, 2) * torch.linspace(0.1, 3, 150)[:, None].to(dtype)
    v = random(2, 2, 150, value_dim, dtype=dtype, seed=1)
    kv = ragged(2, 2, 150, 9, loose=True)
    k[0, 0, 5], v[1, 1, 7], v[0, 1] = torch.nan, torch.inf, 0.5
    got, wanted = BACKEND.group_priority(k, v, kv, every), BASE.group_priority(k, v, kv, every)
    assert got.isfinite().all() and got.std() > 0.1
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(got, BACKEND.group_priority(k, v, kv, every))

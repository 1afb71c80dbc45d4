"""The plain torch primitives against loops, in chunks and whole."""

import math

import pytest
import torch

from residua import Partition
from residua.ops.backend import Backend
from residua.ops.grouping import count_labels, nearest
from residua.ops.summary import group_covariance
from tests.support.oracle import masked_attention, normal, qkv, random_route, worst

BASE = Backend()


@pytest.fixture(params=["whole", "chunks"], autouse=True)
def chunk(request, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setattr("residua.ops.matrices.CHUNK_BYTES", 3000)


def test_assign_takes_the_nearest_and_the_lowest_of_equals():
    x = torch.randint(-9, 9, (2, 70, 3), generator=torch.Generator().manual_seed(0)).float()
    centres = torch.randint(-9, 9, (2, 11, 3), generator=torch.Generator().manual_seed(1)).float()
    centres[:, 7] = centres[:, 2]
    labels = nearest(x, centres)
    for h in range(2):
        for i in range(70):
            distances = [float((x[h, i] - c).square().sum()) for c in centres[h]]
            assert labels[h, i] == distances.index(min(distances))


def test_assign_never_leaves_the_range_on_nan():
    x, centres = normal(1, 20, 3), normal(1, 4, 3, seed=1)
    x[0, 3], centres[0, 2] = math.nan, math.nan
    labels = nearest(x, centres)
    assert ((labels >= 0) & (labels < 4)).all()


def test_count_labels_ignores_negative_ones():
    labels = torch.tensor([[0, 2, -1, 2], [-1, -1, -1, -1]])
    assert count_labels(labels, 4).tolist() == [[1, 0, 2, 0], [0, 0, 0, 0]]


def test_group_means_with_empty_groups_and_padding():
    x = normal(2, 3, 30, 4)
    labels = torch.randint(-1, 6, (2, 3, 30), generator=torch.Generator().manual_seed(2))
    labels = torch.where(labels == 3, 2, labels)
    x = torch.where(labels[..., None] < 0, math.nan, x)  # padding may hold anything
    means = BASE.group_means(x, Partition.from_labels(labels, 6))
    for b in range(2):
        for h in range(3):
            for g in range(6):
                rows = x[b, h][labels[b, h] == g].double()
                wanted = rows.mean(0) if len(rows) else torch.zeros(4).double()
                assert torch.allclose(means[b, h, g].double(), wanted, atol=1e-6)


def test_gather_rows():
    x, order = (normal(2, 3, 20, 4), torch.randint(0, 20, (2, 3, 7), generator=torch.Generator().manual_seed(2)))
    found = BASE.gather_rows(x, order)
    assert all(
        torch.equal(found[b, h, m], x[b, h, order[b, h, m]]) for b in (0, 1) for h in (0, 1, 2) for m in range(7)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_cell_mass(dtype, size):
    anchors, k = size * normal(2, 4, 5, 6), normal(2, 2, 50, 6, seed=1, dtype=dtype)
    kv = random_route(2, 4, 2, 20, 50, 5, 9, lowest=-1, seed=3).kv
    labels = torch.where(kv.labels == 4, 5, kv.labels)  # group 4 is empty
    kv = Partition.from_labels(labels, 9)
    k = torch.where(labels[..., None] < 0, math.nan, k)
    found = BASE.cell_mass(anchors, k, kv, 0.4)
    assert found.dtype == torch.float32 and (found[..., 4] == -math.inf).all()
    for b in range(2):
        for h in range(4):
            logits = 0.4 * anchors[b, h].double() @ k[b, h // 2].double().T  # [5, 50]
            for c in (0, 1, 2, 3, 5, 6, 7, 8):
                wanted = logits[:, labels[b, h // 2] == c].logsumexp(-1)
                assert torch.allclose(found[b, h, :, c].double(), wanted, rtol=1e-4, atol=1e-4)


def test_cell_mass_shows_nan():
    anchors, k = normal(1, 1, 3, 4), normal(1, 1, 20, 4, seed=1)
    k[0, 0, 7, 2] = math.nan
    kv = Partition.from_labels((torch.arange(20) % 5).view(1, 1, 20), 5)
    found = BASE.cell_mass(anchors, k, kv, 1.0)
    assert found[..., 2].isnan().all() and found[..., [0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_attend_rows(dtype):
    q, k, v = qkv(2, 4, 2, 9, 60, 8, 5, dtype=dtype)
    mask = torch.arange(60)[None] < torch.tensor([[60], [0]])
    mask[0, 10] = False
    hidden = ~mask[:, None, :, None]
    wanted, _ = masked_attention(q, k, v, mask[:, None, None])
    found = BASE.attend_rows(q, torch.where(hidden, math.nan, k), torch.where(hidden, math.inf, v), mask, 8**-0.5)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert worst(found, torch.nan_to_num(wanted, 0.0)) < 1e-6
    assert not found[1].any()  # a batch in which every key is padding


def test_add_affine_reuses_or_casts():
    out, left, right, bias = normal(2, 2, 33, 6), normal(2, 2, 6, 3), normal(2, 2, 3, 6), normal(2, 2, 6)
    wanted = out.double() + out.double() @ left.double() @ right.double() + bias.double()[:, :, None]
    assert worst(BASE.add_affine(out.clone(), left, right, bias, torch.float32), wanted) < 1e-6
    low = BASE.add_affine(out.clone(), left, right, bias, torch.bfloat16)
    assert low.dtype == torch.bfloat16 and worst(low, wanted) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_slot_means(dtype, size):
    """Means by softmax weight over all keys of a slot, with padding, an empty group and an empty slot."""
    anchors = size * normal(2, 4, 3, 6)
    k, v = normal(2, 2, 50, 6, seed=1, dtype=dtype), normal(2, 2, 50, 5, seed=2, dtype=dtype)
    labels = random_route(2, 4, 2, 20, 50, 5, 9, lowest=-1, seed=3).kv.labels
    labels = torch.where(labels == 4, 5, labels)  # group 4 is empty
    kv = Partition.from_labels(labels, 9)
    hidden = labels[..., None] < 0
    k, v = torch.where(hidden, math.nan, k), torch.where(hidden, math.nan, v)
    slots = torch.randint(-1, 4, (2, 4, 3, 9), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    slots = torch.where(slots == 2, 1, slots)  # and slot 2
    log_mass = torch.full((2, 4, 3, 4), -math.inf)
    wanted = {}
    for b, h, a, t in torch.cartesian_prod(*(torch.arange(n) for n in (2, 4, 3, 4))).tolist():
        g, groups = h // 2, (slots[b, h, a] == t).nonzero()[:, 0]
        inside = torch.isin(labels[b, g], groups)
        if not inside.any():
            continue
        logits = 0.4 * k[b, g, inside].double() @ anchors[b, h, a].double()
        log_mass[b, h, a, t] = logits.logsumexp(-1)
        weight = logits.softmax(-1)
        wanted[b, h, a, t] = weight @ k[b, g, inside].double(), weight @ v[b, g, inside].double()
    keys, values, _ = BASE.slot_summary(anchors, k, v, kv, slots, log_mass, 0.4)
    assert keys.shape == (2, 4, 3, 4, 6) and values.shape == (2, 4, 3, 4, 5)
    assert keys.dtype == values.dtype == torch.float32 and keys.is_contiguous() and values.is_contiguous()
    assert not keys[..., 2, :].any() and not values[..., 2, :].any()
    for at, (key, value) in wanted.items():
        assert torch.allclose(keys[at].double(), key, atol=2e-6 * max(size, 10))
        assert torch.allclose(values[at].double(), value, atol=2e-6 * max(size, 10))


def test_slot_means_take_nothing_from_cells_of_no_slot():
    anchors, k, v = normal(1, 1, 3, 4), normal(1, 1, 20, 4, seed=1), normal(1, 1, 20, 5, seed=2)
    kv = Partition.from_labels((torch.arange(20) % 5).view(1, 1, 20), 5)
    slots = torch.tensor([0, 1, -1, 0, 1], dtype=torch.int32).expand(1, 1, 3, 5)
    mass = BASE.cell_mass(anchors, k, kv, 1.0)
    log_mass = torch.stack([mass[..., [0, 3]].logsumexp(-1), mass[..., [1, 4]].logsumexp(-1)], -1)
    clean = BASE.slot_summary(anchors, k, v, kv, slots, log_mass, 1.0)[:2]
    k[0, 0, 2::5], v[0, 0, 2::5] = math.inf, math.nan
    dirty = BASE.slot_summary(anchors, k, v, kv, slots, log_mass, 1.0)[:2]
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_covariance(dtype):
    """Around the groups' own means, also where these lie far away."""
    x, v = 100 + normal(2, 3, 40, 4), normal(2, 3, 40, 5, seed=1, dtype=dtype) - 30
    labels = torch.randint(-1, 6, (2, 3, 40), generator=torch.Generator().manual_seed(2))
    labels = torch.where(labels == 3, 2, labels)  # group 3 is empty
    hidden = labels[..., None] < 0
    x, v = torch.where(hidden, math.nan, x), torch.where(hidden, math.inf, v)
    covariance, variance = group_covariance(x, v, Partition.from_labels(labels, 6))
    assert covariance.shape == (2, 3, 6, 4, 5) and variance.shape == (2, 3, 6, 4)
    assert covariance.dtype == variance.dtype == torch.float32
    for b, h, g in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 6))).tolist():
        rows, values = x[b, h][labels[b, h] == g].double(), v[b, h][labels[b, h] == g].double()
        if not len(rows):
            assert not covariance[b, h, g].any() and not variance[b, h, g].any()
            continue
        off, value_off = rows - rows.mean(0), values - values.mean(0)
        assert torch.allclose(covariance[b, h, g].double(), off.T @ value_off / len(rows), atol=1e-4)
        assert torch.allclose(variance[b, h, g].double(), off.square().mean(0), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_split_rows(dtype):
    """Exact rows, and the same rows over their kept groups alone."""
    q, k, v = qkv(2, 4, 2, 9, 60, 8, 5, dtype=dtype)
    mask = torch.arange(60)[None] < torch.tensor([[60], [44]])
    labels = random_route(2, 4, 2, 9, 60, 5, 7, seed=3).kv.labels
    labels = torch.where(mask[:, None], labels, -1)
    kv = Partition.from_labels(labels, 7)
    kept = torch.rand(2, 4, 9, 7, generator=torch.Generator().manual_seed(5)) < 0.5
    kept[0, 0, 0] = False
    kept[..., 6] = False
    hidden = ((labels == 6) | (labels < 0))[..., None]  # what nobody keeps may hold anything
    exact, part, lse = BASE.split_rows(q, k, torch.where(hidden, math.nan, v), kv, kept, mask, 8**-0.5)
    groups = labels.repeat_interleave(2, dim=1)[:, :, None].clamp(min=0).expand(2, 4, 9, 60)
    seen = kept.gather(-1, groups) & mask[:, None, None]
    wanted, wanted_lse = masked_attention(q, k, v, seen)
    assert worst(part, wanted) < 1e-6 and torch.allclose(lse.double(), wanted_lse, atol=1e-5)
    assert not part[0, 0, 0].any() and lse[0, 0, 0] == -math.inf
    clean = BASE.split_rows(q, k, v, kv, kept, mask, 8**-0.5)[0]
    assert torch.equal(clean, BASE.attend_rows(q, k, v, mask, 8**-0.5))
    assert exact[0].isnan().all()  # the exact rows see it

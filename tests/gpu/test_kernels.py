"""Every primitive on a GPU against fp64: at most twice the error of a plain low-precision run."""

import pytest
import torch

from residua.ops.backend import Backend, Demand
from residua.ops.reference import Reference
from residua.ops.select import backends
from residua.ops.triton import TritonBackend
from residua.types import Drift, Partition, Route, SummaryKeys

BASE = Backend()

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = [64, 96, 128, 256]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def ragged(device, batch, heads, tokens, groups, seed=0):
    """Groups of very different sizes, the third empty, some tokens in none."""
    draw = torch.rand(batch, heads, tokens, generator=torch.Generator().manual_seed(seed))
    labels = (draw.square() * (groups + 1)).long() - 1
    return Partition.from_labels(torch.where(labels == 2, 0, labels).to(device), groups)


def call(device, dtype, dim, heads=4, kv_heads=2, queries=1025, keys=1531):
    q = random(device, 2, queries, heads, dim, dtype=dtype).transpose(1, 2)
    k, v = (random(device, 2, kv_heads, keys, dim, dtype=dtype, seed=s) for s in (1, 2))
    cells = torch.rand(2, heads, 9, 33, generator=torch.Generator().manual_seed(3)) < 0.3
    cells[:, :, 5] = False
    query, kv = ragged(device, 2, heads, queries, 9), ragged(device, 2, kv_heads, keys, 33, seed=4)
    return q, k, v, Route(query, kv, cells.to(device))


def random_drift(device, dim, rank=16):
    slope = random(device, 2, 4, 9, rank, dim, seed=14) / rank
    slope[:, :, 2] = torch.nan  # the keys of that group are all off
    return Drift(
        random(device, 2, 2, dim, rank, seed=11) / dim**0.5,
        random(device, 2, 4, 9, rank, seed=12),
        random(device, 2, 4, 9, rank, seed=13).abs() / (2 * rank),
        slope,
    )


def in_fp64(tensors):
    return [t.double() for t in tensors]


def assert_as_good(got, plain_run, truth, floor=1e-6):
    """FlashAttention's rule: at most twice the error of plain torch in the same precision."""
    error = (got.double() - truth).abs().max()
    allowed = 2 * (plain_run.double() - truth).abs().max() + floor
    assert error <= allowed, (error, allowed)


def attention_backends(dtype, dim):
    demand = Demand(torch.device("cuda"), dtype, dim, dim)
    return [b for b in backends().values() if b.name not in ("reference", "torch") and not b.reasons(demand)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["plain", "summary keys", "drift"])
def test_attention(device, dtype, dim, kind):
    q, k, v, route = call(device, dtype, dim)
    summary = None
    if kind != "plain":
        room = (2, 4, 9, 65)
        keys, values = (random(device, *room, dim, seed=s) for s in (5, 6))
        weight = random(device, *room, seed=7)
        weight[:, :, 2] = -torch.inf
        summary = SummaryKeys(keys, values, weight, random_drift(device, dim) if kind == "drift" else None)
    scale = dim**-0.5
    truth, truth_lse = Reference().attend(*in_fp64((q, k, v)), route, scale, summary)
    rough, rough_lse = Reference().attend(q, k, v, route, scale, summary)
    for backend in attention_backends(dtype, dim):
        out, lse = backend.attend(q, k, v, route, scale, summary)
        assert_as_good(out, rough, truth, ROUNDING[dtype] * float(truth.abs().max()) / 4)
        seen = truth_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen), backend.name
        assert_as_good(lse[seen], rough_lse[seen], truth_lse[seen], ROUNDING[dtype])
        if backend.deterministic:
            again, lse_again = backend.attend(q, k, v, route, scale, summary)
            assert torch.equal(out, again)
            assert torch.equal(lse, lse_again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_probe_rows(device, dtype, dim):
    q, k, v, _ = call(device, dtype, dim)
    rows = q[:, :, :64]
    key_mask = torch.rand(2, 1531, generator=torch.Generator().manual_seed(1)).to(device) < 0.8
    truth = BASE.attend_rows(*in_fp64((rows, k, v)), key_mask, 0.1)
    got = TritonBackend().attend_rows(rows, k, v, key_mask, 0.1)
    torch.testing.assert_close(got.double(), truth.double(), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    assert torch.equal(got, TritonBackend().attend_rows(rows, k, v, key_mask, 0.1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_grouping_primitives_keep_fp32_accuracy(device, dtype, dim):
    backend = TritonBackend()
    q, k, _, route = call(device, dtype, dim)
    factor = random(device, 2, 4, dim, 48, seed=8) / dim**0.5
    wanted = q.double() @ factor.double()
    wanted /= wanted.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(backend.project(q, factor, True).double(), wanted.double(), atol=2e-5, rtol=2e-5)
    means = backend.group_means(k, route.kv)
    torch.testing.assert_close(means, BASE.group_means(k.float(), route.kv), atol=1e-5, rtol=1e-5)
    anchors = random(device, 2, 4, 9, dim, seed=9)
    mass = backend.cell_mass(anchors, k, route.kv, 0.1)
    torch.testing.assert_close(mass, BASE.cell_mass(anchors, k.float(), route.kv, 0.1), atol=5e-5, rtol=5e-5)
    assert torch.equal(backend.gather_rows(q, route.query.order), BASE.gather_rows(q, route.query.order))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_summary_primitives_are_accurate(device, dtype, dim):
    backend = TritonBackend()
    _, k, v, route = call(device, dtype, dim)
    anchors = random(device, 2, 4, 70, dim, seed=9)
    slots = torch.randint(-1, 7, (2, 4, 70, 33), generator=torch.Generator().manual_seed(5))
    slots = slots.to(device, torch.int32)
    mass = backend.cell_mass(anchors, k, route.kv, 0.1)
    members = slots[..., None, :] == torch.arange(8, device=device)[:, None]  # [B, H, Cq, T, Ck]
    mass = torch.where(members, mass[..., None, :], -torch.inf).logsumexp(-1)
    arguments = (route.kv, slots, mass, 0.1)
    got = backend.slot_summary(anchors, k, v, *arguments)[:2]
    for one, wanted in zip(got, BASE.slot_summary(anchors, k, v, *arguments)[:2], strict=True):
        torch.testing.assert_close(one, wanted, atol=5e-5, rtol=5e-5)
    # an ordering fault between two groups of a slot would show up here
    for _ in range(3):
        again = backend.slot_summary(anchors, k, v, *arguments)[:2]
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    share, factor = torch.eye(33, device=device).expand(2, 2, -1, -1), random(device, 2, 2, dim, 16, seed=6) / dim**0.5
    given = (share, k, factor, v, route.kv, BASE.group_means(k, route.kv))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # covariances of 16-bit keys are bf16
    for one, wanted in zip(backend.skipped_covariance(*given), BASE.skipped_covariance(*given), strict=True):
        assert (one - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("rank", [48, 64, 128])
def test_kmeans_is_deterministic_and_near_the_truth(device, rank):
    x, centres = random(device, 6, 5003, rank), random(device, 6, 77, rank, seed=1)
    valid = torch.rand(6, 5003, generator=torch.Generator().manual_seed(2)).to(device) < 0.9
    labels, means, sizes = TritonBackend().lloyd(x, centres, 1, valid)
    distance = torch.cdist(x.double(), centres.double()).square()
    chosen = distance.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert torch.equal(labels < 0, ~valid)
    assert ((chosen - distance.amin(-1))[valid] < 1e-3).all()  # ties may differ, distances may not
    partition = Partition.from_labels(labels[None], 77)
    assert torch.equal(sizes, partition.sizes[0])
    wanted = torch.where(sizes[..., None] > 0, BASE.group_means(x[None], partition)[0], centres)
    torch.testing.assert_close(means, wanted, atol=1e-5, rtol=1e-5)
    for got, again in zip((labels, means, sizes), TritonBackend().lloyd(x, centres, 1, valid), strict=True):
        assert torch.equal(got, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repair(device, dtype):
    x, left, right = (random(device, 2, 4, *s) / 8 for s in ((1025, 128), (128, 16), (16, 128)))
    bias = random(device, 2, 4, 128, seed=3)
    wanted = BASE.add_affine(*in_fp64((x, left, right, bias)), torch.float64)
    got = TritonBackend().add_affine(x.clone(), left, right, bias, dtype)
    torch.testing.assert_close(got.double(), wanted, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def test_offsets_past_two_to_the_31(device):
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip(f"needs 12 GiB of free memory, there are {free >> 30}")
    storage = torch.zeros(2**31 // 64 + 4096, 128, dtype=torch.bfloat16, device=device)
    rows = storage[None, None, :: len(storage) // 2048][:, :, :2048]  # the last ones lie past 2^31 elements
    rows.copy_(random(device, 1, 1, 2048, 128, dtype=torch.bfloat16))
    order = ragged(device, 1, 1, 2048, 7).order
    assert torch.equal(TritonBackend().gather_rows(rows, order), BASE.gather_rows(rows.contiguous(), order))

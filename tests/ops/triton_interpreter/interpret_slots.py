"""Slots and covariances, from which a summary is built, in the interpreter against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import assert_near, generator, ragged, random
from torch import Tensor

from residua.ops.reference import Reference
from residua.ops.triton import TritonBackend
from residua.ops.triton.covariance import among_covariance
from residua.types import Partition

BACKEND = TritonBackend()


def slot_truth(anchors, k, v, kv, slots, count, scale):
    """Weights of every key in the slot of its group, in fp64 -> keys, values, log_mass"""
    shares = anchors.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(shares, 1) for t in (k, v))
    labels = kv.labels.repeat_interleave(shares, 1)[:, :, None].expand(-1, -1, anchors.shape[2], -1)
    slot = torch.where(labels < 0, -1, slots.long().gather(3, labels.clamp(min=0)))  # [B, H, Cq, Nk]
    logits = anchors.double() @ k.mT * scale
    member = slot[:, :, :, None] == torch.arange(count)[:, None]  # [B, H, Cq, T, Nk]
    logits = torch.where(member, logits[:, :, :, None], -torch.inf)
    mass = logits.logsumexp(-1)  # [B, H, Cq, T]
    weights = (logits - torch.where(mass == -torch.inf, 0.0, mass)[..., None]).exp()
    return *(torch.einsum("bhatn,bhnd->bhatd", weights, t) for t in (k, v)), mass.float()


def random_slots(batch, heads, kv_heads, anchors, groups):
    """Three of four slots for one group each (the last is nobody's), two of three shared ones in use."""
    near = torch.randint(0, 2, (batch, kv_heads, groups), generator=generator(4))
    shared = near.repeat_interleave(heads // kv_heads, 1)[:, :, None].expand(-1, -1, anchors, -1) + 4
    ranks = torch.rand(batch, heads, anchors, groups, generator=generator(5)).argsort(-1)
    slots = torch.where(ranks < 3, ranks, shared)
    return torch.where(ranks > groups - 3, -1, slots).int(), near


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "anchors", "keys", "dim", "value_dim"),
    [(1, 1, 70, 90, 64, 64), (2, 1, 5, 60, 96, 48), (1, 1, 3, 50, 256, 256)],
)
def test_slot_means(dtype, heads, kv_heads, anchors, keys, dim, value_dim):
    x = random(2, heads, anchors, dim)
    k = random(2, keys, kv_heads, dim, dtype=dtype, seed=1).transpose(1, 2)
    v = random(2, kv_heads, keys, value_dim, dtype=dtype, seed=2)
    kv = ragged(2, kv_heads, keys, 9, loose=True, seed=3)
    slots, near = random_slots(2, heads, kv_heads, anchors, 9)
    wanted_keys, wanted_values, mass = slot_truth(x, k, v, kv, slots, 7, 0.3)
    got = BACKEND.slot_summary(x, k, v, kv, slots, mass, 0.3, near, 4)
    # 16-bit weights and results: each rounds by half a unit of values of up to 3, and members deviate by 2
    tolerance = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    for one, wanted in zip(got[:2], (wanted_keys, wanted_values), strict=True):
        torch.testing.assert_close(one.double(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(got[0][..., 3, :], torch.zeros_like(got[0][..., 3, :]))  # nobody's slot
    assert torch.equal(got[0][..., 6, :], torch.zeros_like(got[0][..., 6, :]))
    again = BACKEND.slot_summary(x, k, v, kv, slots, mass, 0.3, near, 4)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_slot_weighs_what_it_should_at_its_anchor(dtype):
    """Whatever its key was rounded to."""
    x, k = random(1, 2, 5, 64), random(1, 1, 60, 64, dtype=dtype, seed=1)
    kv = ragged(1, 1, 60, 9, seed=3)
    slots, near = random_slots(1, 2, 1, 5, 9)
    *_, mass = slot_truth(x, k, k, kv, slots, 7, 0.3)
    keys, _, weight = BACKEND.slot_summary(x, k, k, kv, slots, mass, 0.3, near, 4)
    assert keys.dtype == dtype
    at_anchor = weight.double() + 0.3 * (x.double()[..., None, :] @ keys.double().mT)[..., 0, :]
    torch.testing.assert_close(at_anchor, mass.double(), atol=2e-5, rtol=2e-5)
    assert (weight == -torch.inf).any()


def test_every_group_in_a_slot_of_its_own():
    x, k, v = random(1, 1, 5, 32), random(1, 1, 60, 32, seed=1), random(1, 1, 60, 32, seed=2)
    kv = ragged(1, 1, 60, 4, seed=3)
    slots = torch.tensor([[2, 0, 1, 3], [0, -1, 1, 2]])[torch.tensor([0, 1, 0, 1, 1])].int()[None, None]
    wanted_keys, wanted_values, mass = slot_truth(x, k, v, kv, slots, 4, 0.3)
    got = BACKEND.slot_summary(x, k, v, kv, slots, mass, 0.3, torch.zeros(1, 1, 4, dtype=torch.long), 4)
    assert_near(got[0], wanted_keys, torch.float32)
    assert_near(got[1], wanted_values, torch.float32)


def test_a_group_without_a_slot_may_hold_anything():
    x, k, v = random(1, 1, 4, 32), random(1, 1, 60, 32, seed=1), random(1, 1, 60, 32, seed=2)
    kv = Partition.from_labels((torch.arange(60) // 20)[None, None], 3)
    slots = torch.tensor([0, -1, 1], dtype=torch.int32).repeat(1, 1, 4, 1)
    near = torch.tensor([0, 1, 1]).view(1, 1, 3)
    slots[..., 2, 1] = 1  # one anchor of the tile sees the group
    _, _, mass = slot_truth(x, k, v, kv, slots, 2, 0.1)
    clean = BACKEND.slot_summary(x, k, v, kv, slots, mass, 0.1, near, 0)
    k[:, :, 25], v[:, :, 30] = torch.nan, torch.inf
    got = BACKEND.slot_summary(x, k, v, kv, slots, mass, 0.1, near, 0)
    others = torch.tensor([0, 1, 3])
    for spoiled, kept in zip(got, clean, strict=True):
        assert torch.equal(spoiled[:, :, others], kept[:, :, others])
        assert spoiled[0, 0, 2, 1].isnan().any()
    nothing = BACKEND.slot_summary(x, k, v, kv, torch.full_like(slots, -1), mass, 0.1, near, 0)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in nothing[:2])


def test_many_light_keys_keep_their_weight():
    """Each weighs 1 / 2000: the parts of such a weight must not end where 16 bits do."""
    k = v = (random(1, 1, 2000, 16, seed=1) + 4).half()
    kv = Partition.from_labels((torch.arange(2000) // 500)[None, None], 4)
    slots = torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    mass = torch.full((1, 1, 1, 1), 2000.0).log()
    keys, _, _ = BACKEND.slot_summary(
        torch.zeros(1, 1, 1, 16), k, v, kv, slots, mass, 1.0, torch.zeros(1, 1, 4, dtype=torch.long), 0
    )
    wanted = k[0, 0].double().mean(0)
    torch.testing.assert_close(keys[0, 0, 0, 0].double(), wanted, atol=0, rtol=torch.finfo(torch.half).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim", "rank"), [(64, 64, 16), (40, 24, 5), (256, 256, 16)])
def test_mixed_covariance(dtype, dim, value_dim, rank):
    """From the keys, in one pass: as from their coordinates in fp64."""
    k = random(1, 120, 2, dim, dtype=dtype).transpose(1, 2) + 3
    v = random(1, 2, 120, value_dim, dtype=dtype, seed=1) + 5
    kv, factor = ragged(1, 2, 120, 7, loose=True), random(1, 2, dim, rank, seed=2) / dim**0.5
    share = random(1, 2, 6, 7, seed=3).softmax(-1)
    wide = Reference()
    centroids = wide.group_means(k.double(), kv)
    wanted = [torch.zeros(1, 2, 6, rank, value_dim).double(), torch.zeros(1, 2, 6, rank).double()]
    for head in range(2):
        for group in range(7):
            rows = kv.labels[0, head] == group
            if rows.any():
                x = k[0, head, rows].double() @ factor[0, head].double()
                x, y = x - x.mean(0), v[0, head, rows].double() - v[0, head, rows].double().mean(0)
                part = share[0, head, :, group].double()
                wanted[0][0, head] += part[:, None, None] * (x.mT @ y / len(x))
                wanted[1][0, head] += part[:, None] * x.square().mean(0)
    got = BACKEND.skipped_covariance(share, k, factor, v, kv, centroids.float())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # shares, covariances and results are bf16
    for one, truth in zip(got, wanted, strict=True):
        assert (one.double() - truth).abs().max() <= tolerance * truth.abs().max()
    with BACKEND.session() as backend:  # there the values are sorted on the way
        again = backend.skipped_covariance(share, k, factor, v, kv, centroids.float())
        rows, lost = backend.group_major(v, kv), backend.lost_channels(v, None)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert not lost.any()
    for head in range(2):
        inside = kv.order[0, head, : kv.offsets[0, head, -1]]
        assert torch.equal(rows[0, head, : len(inside), :value_dim], v[0, head, inside])
    k[0, 0, 0] = torch.nan  # its group counts as nothing, the others stay
    spoiled = BACKEND.skipped_covariance(share, k, factor, v, kv, centroids.float())
    assert all(x.isfinite().all() for x in spoiled)
    assert torch.equal(spoiled[0][:, 1], got[0][:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("dim", "value_dim", "rank", "pools", "pinned"), [(64, 64, 16, 3, 0), (40, 24, 32, 4, 1), (16, 256, 5, 1, 2)]
)
@pytest.mark.parametrize("pooled", [False, True])
def test_covariance_inside_and_among_groups(dtype, dim, value_dim, rank, pools, pinned, pooled):
    """By one product: as by two. Groups that are empty or pinned are in no neighbourhood."""
    k = random(2, 120, 2, dim, dtype=dtype).transpose(1, 2) + 3
    v = random(2, 2, 120, value_dim, dtype=dtype, seed=1) + 5
    kv, factor = ragged(2, 2, 120, 9, loose=True), random(2, 2, dim, rank, seed=2) / dim**0.5
    share, merged = random(2, 2, 6, 9, seed=3).softmax(-1), random(2, 2, 6, pools, seed=4).softmax(-1)
    near = torch.randint(0, pools, (2, 2, 9), generator=generator(5))
    near[0, 0] = 0  # the other neighbourhoods are empty
    centroids = Reference().group_means(k, kv)
    rest = (merged, near, 9 - pinned, pooled)
    wanted = Reference().skipped_covariance(share, k.float(), factor, v.float(), kv, centroids, *rest)
    inside = Reference()._mixed_covariance(
        share, k.float(), factor, v.float(), kv, centroids, near if pooled else None, pools
    )
    assert (wanted[0] - inside[0]).abs().max() > 0.1 * inside[0].abs().max()
    given = (share, k, factor, v, kv, centroids, *rest)
    got = BACKEND.skipped_covariance(*given)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, truth in zip(got, wanted, strict=True):
        assert one.shape == truth.shape
        assert (one.double() - truth).abs().max() <= tolerance * truth.abs().max()
    with BACKEND.session() as backend:
        again = backend.skipped_covariance(*given)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    k[0, 0, 0], v[1, 1, 3] = torch.nan, torch.inf  # their groups and neighbourhoods count as nothing
    spoiled = BACKEND.skipped_covariance(share, k, factor, v, kv, Reference().group_means(k, kv), *rest)
    assert all(x.isfinite().all() for x in spoiled)
    assert torch.equal(spoiled[0][:, :1, :, :][1], got[0][:, :1][1])


def covariance_of_groups(x: Tensor, v: Tensor, kv: Partition) -> tuple[Tensor, Tensor]:
    """Groups of rows as neighbourhoods of groups that hold one row each."""
    batch, heads, count, rank = x.shape
    rows = Partition.from_labels(torch.arange(count).expand(batch, heads, -1), count)
    into = (
        torch.empty(batch, heads, count + kv.groups, rank, v.shape[-1]),
        torch.empty(batch, heads, count + kv.groups, rank),
    )
    among_covariance(x, v, kv.order, kv.offsets, rows, count, into)
    return into[0][:, :, count:], into[1][:, :, count:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "rank", "dim"), [(203, 16, 96), (64, 5, 20), (90, 20, 256)])
def test_group_covariance(dtype, tokens, rank, dim):
    x = random(2, tokens, 2, rank).transpose(1, 2) + 50  # far from 0: the means must come off first
    v = random(2, 2, tokens, dim, dtype=dtype, seed=1) + 3
    kv = ragged(2, 2, tokens, 7, loose=True)
    covariance, variance = covariance_of_groups(x, v, kv)
    for b in range(2):
        for h in range(2):
            for g in range(7):
                rows = kv.labels[b, h] == g
                off, value_off = (t[b, h, rows].double() - t[b, h, rows].double().mean(0, keepdim=True) for t in (x, v))
                count = max(1, int(rows.sum()))
                assert_near(covariance[b, h, g], off.mT @ value_off / count, torch.float32)
                assert_near(variance[b, h, g], off.square().sum(0) / count, torch.float32)
    assert torch.equal(covariance[:, :, 2], torch.zeros_like(covariance[:, :, 2]))
    again = covariance_of_groups(x, v, kv)
    assert all(torch.equal(a, b) for a, b in zip((covariance, variance), again, strict=True))


def test_nan_counts_as_nothing_in_its_group_and_padding_in_none():
    x, v = random(1, 1, 40, 16), random(1, 1, 40, 32, seed=1)
    kv = Partition.from_labels(torch.where(torch.arange(40) < 36, torch.arange(40) // 12, -1)[None, None], 3)
    clean = covariance_of_groups(x, v, kv)
    x[:, :, 13], v[:, :, 38] = torch.nan, torch.nan
    for spoiled, kept in zip(covariance_of_groups(x, v, kv), clean, strict=True):
        assert not spoiled[:, :, 1].any()
        assert torch.equal(spoiled[:, :, ::2], kept[:, :, ::2])


def test_empty_inputs_launch_nothing():
    x, none = random(1, 1, 3, 16), Partition.from_labels(torch.zeros(1, 1, 0, dtype=torch.long), 2)
    keys, values, _ = BACKEND.slot_summary(
        x,
        x[:, :, :0],
        x[:, :, :0, :4],
        none,
        torch.zeros(1, 1, 3, 2).int(),
        torch.zeros(1, 1, 3, 0),
        1.0,
        torch.zeros(1, 1, 2, dtype=torch.long),
        0,
    )
    assert keys.shape == (1, 1, 3, 0, 16)
    assert values.shape == (1, 1, 3, 0, 4)
    covariance, variance = covariance_of_groups(x[:, :, :0], x[:, :, :0], none)
    assert torch.equal(covariance, torch.zeros(1, 1, 2, 16, 16))
    assert torch.equal(variance, torch.zeros(1, 1, 2, 16))

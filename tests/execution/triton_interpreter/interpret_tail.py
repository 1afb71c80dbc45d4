"""Slots and covariances, from which the tail is built, in the interpreter against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import assert_near, generator, ragged, random

from residua.execution.triton import TritonBackend
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
    got = BACKEND.slot_means(x, k, v, kv, slots, mass, 0.3, near, 4)
    # two parts of a weight hold 16 binary digits in bf16, 22 in fp16
    tolerance = 2e-4 if dtype == torch.bfloat16 else 2e-5
    for one, wanted in zip(got, (wanted_keys, wanted_values), strict=True):
        torch.testing.assert_close(one.double(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(got[0][..., 3, :], torch.zeros_like(got[0][..., 3, :]))  # nobody's slot
    assert torch.equal(got[0][..., 6, :], torch.zeros_like(got[0][..., 6, :]))
    again = BACKEND.slot_means(x, k, v, kv, slots, mass, 0.3, near, 4)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_every_group_in_a_slot_of_its_own():
    x, k, v = random(1, 1, 5, 32), random(1, 1, 60, 32, seed=1), random(1, 1, 60, 32, seed=2)
    kv = ragged(1, 1, 60, 4, seed=3)
    slots = torch.tensor([[2, 0, 1, 3], [0, -1, 1, 2]])[torch.tensor([0, 1, 0, 1, 1])].int()[None, None]
    wanted_keys, wanted_values, mass = slot_truth(x, k, v, kv, slots, 4, 0.3)
    got = BACKEND.slot_means(x, k, v, kv, slots, mass, 0.3, torch.zeros(1, 1, 4, dtype=torch.long), 4)
    assert_near(got[0], wanted_keys, torch.float32)
    assert_near(got[1], wanted_values, torch.float32)


def test_a_group_without_a_slot_may_hold_anything():
    x, k, v = random(1, 1, 4, 32), random(1, 1, 60, 32, seed=1), random(1, 1, 60, 32, seed=2)
    kv = Partition.from_labels((torch.arange(60) // 20)[None, None], 3)
    slots = torch.tensor([0, -1, 1], dtype=torch.int32).repeat(1, 1, 4, 1)
    near = torch.tensor([0, 1, 1]).view(1, 1, 3)
    slots[..., 2, 1] = 1  # one anchor of the tile sees the group
    _, _, mass = slot_truth(x, k, v, kv, slots, 2, 0.1)
    clean = BACKEND.slot_means(x, k, v, kv, slots, mass, 0.1, near, 0)
    k[:, :, 25], v[:, :, 30] = torch.nan, torch.inf
    got = BACKEND.slot_means(x, k, v, kv, slots, mass, 0.1, near, 0)
    others = torch.tensor([0, 1, 3])
    for spoiled, kept in zip(got, clean, strict=True):
        assert torch.equal(spoiled[:, :, others], kept[:, :, others])
        assert spoiled[0, 0, 2, 1].isnan().any()
    nothing = BACKEND.slot_means(x, k, v, kv, torch.full_like(slots, -1), mass, 0.1, near, 0)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in nothing)


def test_many_light_keys_keep_their_weight():
    """Each weighs 1 / 2000: the parts of such a weight must not end where 16 bits do."""
    k = v = (random(1, 1, 2000, 16, seed=1) + 4).half()
    kv = Partition.from_labels((torch.arange(2000) // 500)[None, None], 4)
    slots = torch.zeros(1, 1, 1, 4, dtype=torch.int32)
    mass = torch.full((1, 1, 1, 1), 2000.0).log()
    keys, _ = BACKEND.slot_means(
        torch.zeros(1, 1, 1, 16), k, v, kv, slots, mass, 1.0, torch.zeros(1, 1, 4, dtype=torch.long), 0
    )
    torch.testing.assert_close(keys[0, 0, 0, 0].double(), k[0, 0].double().mean(0), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "rank", "dim"), [(203, 16, 96), (64, 5, 20), (90, 20, 256)])
def test_group_covariance(dtype, tokens, rank, dim):
    x = random(2, tokens, 2, rank).transpose(1, 2) + 50  # far from 0: the means must come off first
    v = random(2, 2, tokens, dim, dtype=dtype, seed=1) + 3
    kv = ragged(2, 2, tokens, 7, loose=True)
    covariance, variance = BACKEND.group_covariance(x, v, kv)
    for b in range(2):
        for h in range(2):
            for g in range(7):
                rows = kv.labels[b, h] == g
                off, value_off = (
                    t[b, h, rows].double() - t[b, h, rows].double().mean(0, keepdim=True) for t in (x, v)
                )
                count = max(1, int(rows.sum()))
                assert_near(covariance[b, h, g], off.mT @ value_off / count, torch.float32)
                assert_near(variance[b, h, g], off.square().sum(0) / count, torch.float32)
    assert torch.equal(covariance[:, :, 2], torch.zeros_like(covariance[:, :, 2]))
    again = BACKEND.group_covariance(x, v, kv)
    assert all(torch.equal(a, b) for a, b in zip((covariance, variance), again, strict=True))


def test_nan_stays_in_its_group_and_padding_in_none():
    x, v = random(1, 1, 40, 16), random(1, 1, 40, 32, seed=1)
    kv = Partition.from_labels(torch.where(torch.arange(40) < 36, torch.arange(40) // 12, -1)[None, None], 3)
    clean = BACKEND.group_covariance(x, v, kv)
    x[:, :, 13], v[:, :, 38] = torch.nan, torch.nan
    for spoiled, kept in zip(BACKEND.group_covariance(x, v, kv), clean, strict=True):
        assert spoiled[:, :, 1].isnan().all()
        assert torch.equal(spoiled[:, :, ::2], kept[:, :, ::2])


def test_empty_inputs_launch_nothing():
    x, none = random(1, 1, 3, 16), Partition.from_labels(torch.zeros(1, 1, 0, dtype=torch.long), 2)
    keys, values = BACKEND.slot_means(
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
    covariance, variance = BACKEND.group_covariance(x[:, :, :0], x[:, :, :0], none)
    assert torch.equal(covariance, torch.zeros(1, 1, 2, 16, 16))
    assert torch.equal(variance, torch.zeros(1, 1, 2, 16))

"""Covariances of values and keys, mixed over groups, in the native backend on every instruction set."""

import pytest
import torch
from torch import Tensor

from residua.errors import RouteError
from residua.ops.backend import TorchBackend
from residua.ops.native import NativeBackend
from residua.types import Partition
from tests.support.native_library import needs_library, on_every_isa
from tests.support.summary_cases import DTYPES, chance, mixture, partition, rows

pytestmark = [needs_library, on_every_isa]


def exact_covariance(
    share: Tensor, k: Tensor, factor: Tensor, v: Tensor, kv: Partition, centroids: Tensor
) -> tuple[Tensor, Tensor]:
    """In fp64, around the means of each group's own rows."""
    batch, heads, groups, _ = centroids.shape
    x = k.double() @ factor.double()
    slopes = torch.zeros(batch, heads, groups, x.shape[-1], v.shape[-1], dtype=torch.double)
    curves = slopes.new_zeros(slopes.shape[:-1])
    for h in range(heads):
        for c in range(groups):
            own = kv.labels[0, h] == c
            if not own.any():
                continue
            off, value_off = (t[0, h, own] - t[0, h, own].mean(0) for t in (x, v.double()))
            slopes[0, h, c] = off.mT @ value_off / own.sum()
            curves[0, h, c] = off.square().mean(0)
    return (share.double() @ slopes.flatten(3)).unflatten(-1, slopes.shape[3:]), share.double() @ curves


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rank,dim,value_dim,count", [(1, 8, 8, 3), (5, 24, 20, 7), (16, 64, 96, None), (32, 128, 128, 41), (70, 96, 17, 6)]
)
def test_mixed_covariance_error_is_at_most_twice_that_of_plain_torch(isa, dtype, rank, dim, value_dim, count):
    k, v = rows(0, 1, 2, 900, dim, dtype=dtype) + 10, rows(1, 1, 2, 900, value_dim, dtype=dtype) + 3
    kv = partition(2, 2, 900, 12)
    case = mixture(k, v, kv, rank, count)
    assert bool((kv.sizes == 0).any()) and bool((kv.sizes > 64).any())
    found, low = NativeBackend(isa)._mixed_covariance(*case), TorchBackend()._mixed_covariance(*case)
    for got, other, wanted in zip(found, low, exact_covariance(*case), strict=True):
        error, allowed = (got - wanted).norm(), (other - wanted).norm()
        assert got.dtype == torch.float32 and got.shape == wanted.shape
        assert error <= 2 * allowed + 1e-7 * wanted.norm(), f"error {error:.3g}, plain has {allowed:.3g}"
        if count is None:
            assert bool((got[kv.sizes == 0] == 0).all())


@pytest.mark.parametrize("pools", [1, 5, 12])
def test_groups_of_a_pool_share_the_mean_over_their_keys(isa, pools, threads):
    k, v, kv = rows(0, 2, 2, 900, 64) + 3, rows(1, 2, 2, 900, 40), partition(2, 2, 900, 12)
    kv = Partition.from_labels(torch.cat([kv.labels, kv.labels.flip(-1)]), 12)
    share, _, factor, _, _, centroids = mixture(k, v, kv, 6, 17)
    pool = (chance(7, 2, 2, 12) * pools).long()
    threads(2)
    found = NativeBackend(isa)._mixed_covariance(share, k, factor, v, kv, centroids, pool, pools)
    for b, h in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        x, slope, total = (((k[b, h] - 3) @ factor[b, h]).double(), torch.zeros(pools, 6, 40), torch.zeros(pools))
        for g in range(12):
            at = kv.labels[b, h] == g
            if not at.any():
                continue
            off, value_off = (y[at].double() - y[at].double().mean(0) for y in (x, v[b, h]))
            slope[pool[b, h, g]] += (off.T @ value_off).float()
            total[pool[b, h, g]] += at.sum()
        mean = slope / total.clamp(min=1)[:, None, None]
        wanted = torch.einsum("mg,grd->mrd", share[b, h], mean[pool[b, h]])
        torch.testing.assert_close(found[0][b, h], wanted, rtol=1e-4, atol=1e-4)
    threads(1)
    again = NativeBackend(isa)._mixed_covariance(share, k, factor, v, kv, centroids, pool, pools)
    other = TorchBackend()._mixed_covariance(share, k, factor, v, kv, centroids, pool, pools)
    for one, two, three in zip(found, again, other, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-4)
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa)._mixed_covariance(share, k, factor, v, kv, centroids, pool + pools, pools)


def test_values_far_from_zero_do_not_drown_their_covariance(isa):
    k, v, kv = rows(0, 1, 2, 500, 16), rows(1, 1, 2, 500, 24), partition(2, 2, 500, 7)
    near, far = (NativeBackend(isa)._mixed_covariance(*mixture(k, x, kv, 6))[0] for x in (v, v + 1000))
    torch.testing.assert_close(far, near, rtol=0, atol=1e-3 * float(near.abs().max()))


def test_more_heads_than_fit_into_one_wave(isa, monkeypatch):
    """Heads are independent: many of them give what each gives alone."""
    k, v, kv = rows(0, 1, 6, 300, 64), rows(1, 1, 6, 300, 128), partition(2, 6, 300, 250)
    share, _, factor, _, _, centroids = mixture(k, v, kv, 64, 3)  # 8 MB a head, 32 MB in a wave
    backend = NativeBackend(isa)
    slope, curve = backend._mixed_covariance(share, k, factor, v, kv, centroids)
    for h in range(6):
        own = [t[:, h : h + 1] for t in (share, k, factor, v)]
        alone = Partition(*(t[:, h : h + 1].contiguous() for t in (kv.labels, kv.order, kv.offsets)))
        one = backend._mixed_covariance(*own, alone, centroids[:, h : h + 1])
        assert torch.equal(one[0], slope[:, h : h + 1]) and torch.equal(one[1], curve[:, h : h + 1])


def test_what_is_not_finite_in_one_group_counts_as_nothing_there(isa):
    k, v, kv = rows(0, 1, 2, 500, 16), rows(1, 1, 2, 500, 24), partition(2, 2, 500, 7)
    backend = NativeBackend(isa)
    clean = backend._mixed_covariance(*mixture(k, v, kv, 6))
    case = mixture(k, v, kv, 6)
    v[..., 5][kv.labels == 2] = torch.nan
    k[kv.labels == -1] = torch.nan
    slope, curve = backend._mixed_covariance(*case)
    others, channels = torch.arange(7) != 2, torch.arange(24) != 5
    assert torch.equal(slope[:, :, others], clean[0][:, :, others]) and torch.equal(curve, clean[1])
    assert bool((slope[:, :, 2, :, 5] == 0).all())
    torch.testing.assert_close(slope[:, :, 2][..., channels], clean[0][:, :, 2][..., channels])

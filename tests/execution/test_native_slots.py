"""Far keys in the native backend, on every instruction set: drifting extra keys, slot means, covariances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_library import needs_library, on_every_isa
from torch import Tensor

from residua.errors import RouteError
from residua.execution import plain
from residua.execution.native import NativeBackend
from residua.execution.portable import Portable
from residua.execution.reference import Reference
from residua.types import MAX_BEND, Drift, Partition, Route, SummaryKeys

pytestmark = [needs_library, on_every_isa]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = [(8, 20), (20, 8), (64, 96), (96, 64), (128, 128)]
SCALE = 0.2
OFF = 4  # the query group whose extra keys are all switched off
BARE = 2  # the query group that keeps no cell


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chance(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def partition(seed: int, heads: int, tokens: int, groups: int, loose: float = 0.1) -> Partition:
    """Ragged groups; the last one is empty, and a share `loose` of the tokens belongs to none."""
    labels = (chance(seed, 1, heads, tokens).square() * (groups - 1)).long()
    labels[chance(seed + 1, *labels.shape) < loose] = -1
    return Partition.from_labels(labels, groups)


def drifting(
    dim: int, value_dim: int, dtype: torch.dtype = torch.float32, *, tokens: int = 257, count: int = 5,
    rank: int = 16,
) -> tuple[Tensor, Tensor, Tensor, Route, SummaryKeys]:  # fmt: skip
    """Four heads on two K/V heads, seven query groups; about a third of the extra keys is switched off."""
    heads, kv_heads, cq, ck = 4, 2, 7, 9
    q, k, v = (
        rows(seed, 1, h, tokens, width, dtype=dtype)
        for seed, h, width in ((0, heads, dim), (1, kv_heads, dim), (2, kv_heads, value_dim))
    )
    cells = chance(3, 1, heads, cq, ck) < 0.4
    cells[:, :, BARE] = False
    weight = rows(4, 1, heads, cq, count) + 2
    weight[chance(5, *weight.shape) < 0.3] = -torch.inf
    weight[:, :, BARE, 0] = 1.0
    weight[:, :, OFF] = -torch.inf
    drift = Drift(
        rows(6, 1, kv_heads, dim, rank) / dim**0.5,
        rows(7, 1, heads, cq, rank),
        rows(8, 1, heads, cq, rank).abs() / (2 * rank) * MAX_BEND,
        rows(9, 1, heads, cq, rank, value_dim) / rank**0.5,
    )
    route = Route(partition(10, heads, tokens, cq), partition(12, kv_heads, tokens, ck), cells)
    keys, values = rows(14, 1, heads, cq, count, dim), rows(15, 1, heads, cq, count, value_dim)
    return q, k, v, route, SummaryKeys(keys, values, weight, drift)


def validate(q: Tensor, k: Tensor, v: Tensor, route: Route, scale: float, extra: SummaryKeys):
    return Reference().attend(q.double(), k.double(), v.double(), route, scale, extra)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, route: Route, scale: float, extra: SummaryKeys) -> Tensor:
    """Attention over kept and extra keys by torch in the dtype of q: the error that is allowed twice."""
    assert extra.drift is not None
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        for a in range(route.query.groups):
            own, labels = route.query.labels[0, h] == a, route.kv.labels[0, g]
            seen = route.cells[0, h, a][labels.clamp(min=0)] & (labels >= 0)
            on = extra.log_weight[0, h, a] > -torch.inf
            more, values, weight, basis, origin, curve, slope = (
                t.to(q.dtype)
                for t in (
                    extra.keys[0, h, a][on], extra.values[0, h, a][on], extra.log_weight[0, h, a][on],
                    extra.drift.basis[0, g], extra.drift.origin[0, h, a], extra.drift.curve[0, h, a],
                    extra.drift.slope[0, h, a],
                )
            )  # fmt: skip
            x = q[0, h, own]
            y = x @ basis - origin
            bend = (y.square() @ curve).clamp(max=MAX_BEND)[:, None]
            logits = torch.cat([x @ k[0, g, seen].mT * scale, x @ more.mT * scale + weight + bend], 1)
            share = logits.softmax(-1)
            tail = share[:, seen.sum() :]
            shift = tail.sum(-1, keepdim=True) * (y @ slope) if on.any() else 0.0
            out[0, h, own] = share @ torch.cat([v[0, g, seen], values]) + shift
    return out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim,value_dim", DIMS)
def test_drift_error_is_at_most_twice_that_of_plain_torch(isa, dtype, dim, value_dim):
    q, k, v, route, extra = drifting(dim, value_dim, dtype)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, extra)
    wanted, wanted_lse = validate(q, k, v, route, SCALE, extra)
    allowed = (plain_attend(q, k, v, route, SCALE, extra).double() - wanted).norm()
    error = (out.double() - wanted).norm()
    assert error <= 2 * allowed + 1e-6 * wanted.norm(), f"error {error:.3g}, plain torch has {allowed:.3g}"
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-5)
    still, still_lse = validate(q, k, v, route, SCALE, replace(extra, drift=None))
    assert (still - wanted).norm() > 0.05 * wanted.norm() and (still_lse != wanted_lse).any()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("rank", [1, 5, 70])
def test_drift_at_any_scale_and_rank(isa, scale, rank):
    q, k, v, route, extra = drifting(20, 24, count=70, rank=rank)
    out, lse = NativeBackend(isa).attend(q, k, v, route, scale, extra)
    wanted, wanted_lse = validate(q, k, v, route, scale, extra)
    assert (out.double() - wanted).norm() <= 2e-6 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drift_without_extra_keys_touches_nothing(isa, dtype):
    q, k, v, route, extra = drifting(64, 64, dtype)
    drift = extra.drift
    for part in (drift.origin, drift.curve, drift.slope):
        part[:, :, OFF] = torch.nan
    backend, group = NativeBackend(isa), route.query.labels == OFF
    with_drift = backend.attend(q, k, v, route, SCALE, extra)
    without = backend.attend(q, k, v, route, SCALE)
    assert group.any()
    for got, wanted in zip(with_drift, without, strict=True):
        assert torch.equal(got[group], wanted[group]) and not bool(got.isnan().any())


@pytest.mark.parametrize("weight", [-150.0, 150.0])
def test_drift_of_a_summary_that_is_nothing_or_everything(isa, weight):
    q, k, v, route, extra = drifting(64, 64)
    extra = replace(extra, log_weight=extra.log_weight + weight)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, extra)
    wanted, wanted_lse = validate(q, k, v, route, SCALE, extra)
    assert (out.double() - wanted).norm() <= 1e-5 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("where", "bad"),
    [
        (where, bad)
        for where in ("q", "basis", "origin", "slope")
        for bad in (torch.nan, torch.inf, -torch.inf)
    ]
    + [("curve", torch.nan), ("curve", torch.inf)],  # it is never negative
)
def test_non_finite_drift_spreads_as_in_portable(isa, dtype, where, bad):
    q, k, v, route, extra = drifting(24, 20, dtype)
    if where == "q":
        q[0, 1, 77, 13] = bad
    else:
        getattr(extra.drift, where)[0, 1, BARE, 1] = bad
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, extra)
    wanted, wanted_lse = Portable().attend(q, k, v, route, SCALE, extra)
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.isinf(), wanted.isinf())
    assert torch.equal(lse.isnan(), wanted_lse.isnan())


def slotted(
    dim: int, value_dim: int, dtype: torch.dtype = torch.float32, *, tokens: int = 700, cq: int = 13,
    groups: int = 10, count: int = 4,
) -> tuple[Tensor, Tensor, Tensor, Partition, Tensor, Tensor]:  # fmt: skip
    """Arguments of `slot_means`, without the scale. Every anchor has cells of no slot, the last one nothing
    else; slot 0 is empty."""
    heads, kv_heads = 4, 2
    k = rows(0, 1, kv_heads, tokens, dim, dtype=dtype)
    v = rows(1, 1, kv_heads, tokens, value_dim, dtype=dtype)
    anchors, kv = rows(2, 1, heads, cq, dim), partition(3, kv_heads, tokens, groups)
    slots = (chance(5, 1, heads, cq, groups) * (count + 1)).int() - 1
    slots[slots == 0] = -1
    slots[:, :, -1] = -1
    mass = plain.cell_mass(anchors, k, kv, SCALE)
    log_mass = [torch.where(slots == t, mass, -torch.inf).logsumexp(-1) for t in range(count)]
    return anchors, k, v, kv, slots, torch.stack(log_mass, -1)


def slot_judge(
    anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """In fp64, with a weight for every anchor, slot and key; a key's share of its slot is at most 1."""
    shares, count = anchors.shape[1] // k.shape[1], log_mass.shape[-1]
    k, v, labels = (t.repeat_interleave(shares, 1) for t in (k.double(), v.double(), kv.labels))
    slot_of = torch.take_along_dim(slots, labels.clamp(min=0)[:, :, None], -1)  # [B, H, Cq, Nk]
    slot_of = torch.where((labels >= 0)[:, :, None], slot_of, -1)
    logits = (anchors.double() @ k.mT * scale)[..., None, :] - log_mass.double()[..., None]
    inside = slot_of[..., None, :] == torch.arange(count)[:, None]  # [B, H, Cq, T, Nk]
    weights = torch.where(inside, logits, -torch.inf).clamp(max=0.0).exp()
    return weights @ k[:, :, None], weights @ v[:, :, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim,value_dim", DIMS)
def test_slot_means_error_is_at_most_twice_that_of_plain_torch(isa, dtype, dim, value_dim):
    case = slotted(dim, value_dim, dtype)
    found = NativeBackend(isa).slot_means(*case, SCALE)
    for got, low, wanted in zip(found, plain.slot_means(*case, SCALE), slot_judge(*case, SCALE), strict=True):
        assert got.shape == wanted.shape and got.dtype == torch.float32 and got.is_contiguous()
        error, allowed = (got - wanted).norm(), (low - wanted).norm()
        assert error <= 2 * allowed + 1e-7 * wanted.norm(), f"error {error:.3g}, plain has {allowed:.3g}"
        assert bool((got[:, :, -1] == 0).all()) and bool((got[..., 0, :] == 0).all())
    assert bool((case[3].sizes == 0).any()) and float(case[5][:, :, :-1, 1:].max()) > -torch.inf


@pytest.mark.parametrize("tokens,groups,cq", [(1, 1, 1), (70, 30, 5), (900, 3, 7), (515, 5, 100)])
@pytest.mark.parametrize("scale", [0.2, -0.2, 0.0])
def test_slot_means_of_odd_sizes(isa, tokens, groups, cq, scale):
    anchors, k, v, _, _, _ = slotted(24, 40, tokens=tokens, cq=cq, groups=groups)
    kv = Partition.from_labels((chance(7, 1, 2, tokens) * groups).long(), groups)
    slots = (chance(8, 1, 4, cq, groups) * 4).int() - 1
    log_mass = rows(9, 1, 4, cq, 3) + 3
    for got, wanted in zip(
        NativeBackend(isa).slot_means(anchors, k, v, kv, slots, log_mass, scale),
        slot_judge(anchors, k, v, kv, slots, log_mass, scale),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_cells_of_no_slot_touch_nothing(isa):
    anchors, k, v, kv, slots, log_mass = slotted(64, 40)
    slots[..., 3] = -1
    slots[:, :, 5, 3] = 2  # one anchor that does see the group
    backend = NativeBackend(isa)
    clean = backend.slot_means(anchors, k, v, kv, slots, log_mass, SCALE)
    skipped = kv.labels == 3
    assert skipped.any()
    k[skipped], v[skipped] = torch.nan, torch.inf
    others = torch.arange(anchors.shape[2]) != 5
    for got, wanted in zip(backend.slot_means(anchors, k, v, kv, slots, log_mass, SCALE), clean, strict=True):
        assert torch.equal(got[:, :, others], wanted[:, :, others])
        assert bool(got[:, :, 5, 2].isnan().all()) and bool(got[:, :, 5, 1].isfinite().all())


def test_slots_of_nothing_are_zero(isa):
    anchors, k, v, kv, slots, log_mass = slotted(16, 24)
    nothing = torch.full_like(slots, -1), log_mass
    none_at_all = torch.full_like(slots, -1), log_mass[..., :0]
    for at, mass in (nothing, none_at_all):
        keys, values = NativeBackend(isa).slot_means(anchors, k, v, kv, at, mass, SCALE)
        assert keys.shape == (*mass.shape, 16) and values.shape == (*mass.shape, 24)
        assert bool((keys == 0).all()) and bool((values == 0).all())


@pytest.mark.parametrize("anchor,mass", [(1.0, -200.0), (1e30, -200.0), (0.0, 0.0), (0.0, -1e-3)])
def test_a_weight_is_at_most_a_share(isa, anchor, mass):
    """Rounding of huge or tied scores makes a key weigh more than its slot: then it weighs as much. The same
    in the native backend and in plain torch."""
    anchors, k, v, kv, slots, log_mass = slotted(16, 24)
    case = (anchors.abs() * anchor, k.abs(), v.abs(), kv, slots, torch.full_like(log_mass, mass), SCALE)
    for backend in (NativeBackend(isa), Portable()):
        for got, wanted in zip(backend.slot_means(*case), slot_judge(*case), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_huge_scores_make_no_sum_larger_than_all_its_keys(isa):
    anchors, k, v, kv, slots, _ = slotted(16, 24)
    anchors = anchors * 1e12  # scores of 1e12 are rounded by 1e5: exp of that would be infinite
    mass = plain.cell_mass(anchors, k, kv, SCALE)
    log_mass = torch.stack(
        [torch.where(slots == t, mass, -torch.inf).logsumexp(-1) for t in range(4)], -1
    )  # fmt: skip
    for backend in (NativeBackend(isa), Portable()):
        keys, values = backend.slot_means(anchors, k, v, kv, slots, log_mass, SCALE)
        assert bool((keys.abs() <= k.abs().sum((0, 1, 2))).all())
        assert bool((values.abs() <= v.abs().sum((0, 1, 2))).all())


def test_slots_and_partitions_that_point_outside_are_refused(isa):
    anchors, k, v, kv, slots, log_mass = slotted(16, 16)
    slots[0, 1, 2, 3] = log_mass.shape[-1]
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa).slot_means(anchors, k, v, kv, slots, log_mass, SCALE)
    kv.order[0, 1, 5] = k.shape[2]
    with pytest.raises(RouteError, match="from_labels"):
        NativeBackend(isa).slot_means(anchors, k, v, kv, slots.clamp(max=1), log_mass, SCALE)
    with pytest.raises(RouteError, match="from_labels"):
        NativeBackend(isa).mixed_covariance(*mixture(k, v, kv, 4))
    near = torch.zeros(1, 2, 10, dtype=torch.long)
    near[0, 1, 3] = log_mass.shape[-1]
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa).slot_means(anchors, k, v, kv, slots.clamp(max=1), log_mass, SCALE, near, 0)


def test_groups_may_be_visited_by_neighbourhood(isa):
    """The sums are the same but for the order in which they are added."""
    anchors, k, v, kv, _, _ = slotted(64, 40)
    near = (chance(6, 1, 2, 10) * 3).long()
    slots = near.repeat_interleave(2, dim=1)[:, :, None].expand(-1, -1, 13, -1).int()
    mass = plain.cell_mass(anchors, k, kv, SCALE)
    log_mass = torch.stack([torch.where(slots == t, mass, -torch.inf).logsumexp(-1) for t in range(3)], -1)
    case = (anchors, k, v, kv, slots, log_mass, SCALE)
    for got, wanted in zip(
        NativeBackend(isa).slot_means(*case, near, 0), slot_judge(*case), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def mixture(
    k: Tensor, v: Tensor, kv: Partition, rank: int, count: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Partition, Tensor]:
    """Arguments of `mixed_covariance`; every group for itself unless a count of mixtures is given."""
    batch, heads, _, dim = k.shape
    share = torch.eye(kv.groups).expand(batch, heads, -1, -1)
    if count is not None:
        share = rows(11, batch, heads, count, kv.groups).softmax(-1)
    return share, k, rows(12, batch, heads, dim, rank), v, kv, plain.group_means(k.float(), kv)


def mixture_judge(
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
    "rank,dim,value_dim,count",
    [(1, 8, 8, 3), (5, 24, 20, 7), (16, 64, 96, None), (32, 128, 128, 41), (70, 96, 17, 6)],
)
def test_mixed_covariance_error_is_at_most_twice_that_of_plain_torch(isa, dtype, rank, dim, value_dim, count):
    k, v = rows(0, 1, 2, 900, dim, dtype=dtype) + 10, rows(1, 1, 2, 900, value_dim, dtype=dtype) + 3
    kv = partition(2, 2, 900, 12)
    case = mixture(k, v, kv, rank, count)
    assert bool((kv.sizes == 0).any()) and bool((kv.sizes > 64).any())
    found, low = NativeBackend(isa).mixed_covariance(*case), Portable().mixed_covariance(*case)
    for got, other, wanted in zip(found, low, mixture_judge(*case), strict=True):
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
    found = NativeBackend(isa).mixed_covariance(share, k, factor, v, kv, centroids, pool, pools)
    for b, h in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        x, slope, total = (
            ((k[b, h] - 3) @ factor[b, h]).double(),
            torch.zeros(pools, 6, 40),
            torch.zeros(pools),
        )
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
    again = NativeBackend(isa).mixed_covariance(share, k, factor, v, kv, centroids, pool, pools)
    other = Portable().mixed_covariance(share, k, factor, v, kv, centroids, pool, pools)
    for one, two, three in zip(found, again, other, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-4)
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa).mixed_covariance(share, k, factor, v, kv, centroids, pool + pools, pools)


def test_values_far_from_zero_do_not_drown_their_covariance(isa):
    k, v, kv = rows(0, 1, 2, 500, 16), rows(1, 1, 2, 500, 24), partition(2, 2, 500, 7)
    near, far = (NativeBackend(isa).mixed_covariance(*mixture(k, x, kv, 6))[0] for x in (v, v + 1000))
    torch.testing.assert_close(far, near, rtol=0, atol=1e-3 * float(near.abs().max()))


def test_more_heads_than_fit_into_one_wave(isa, monkeypatch):
    """Heads are independent: many of them give what each gives alone."""
    k, v, kv = rows(0, 1, 6, 300, 64), rows(1, 1, 6, 300, 128), partition(2, 6, 300, 250)
    share, _, factor, _, _, centroids = mixture(k, v, kv, 64, 3)  # 8 MB a head, 32 MB in a wave
    backend = NativeBackend(isa)
    slope, curve = backend.mixed_covariance(share, k, factor, v, kv, centroids)
    for h in range(6):
        own = [t[:, h : h + 1] for t in (share, k, factor, v)]
        alone = Partition(*(t[:, h : h + 1].contiguous() for t in (kv.labels, kv.order, kv.offsets)))
        one = backend.mixed_covariance(*own, alone, centroids[:, h : h + 1])
        assert torch.equal(one[0], slope[:, h : h + 1]) and torch.equal(one[1], curve[:, h : h + 1])


def test_what_is_not_finite_in_one_group_counts_as_nothing_there(isa):
    k, v, kv = rows(0, 1, 2, 500, 16), rows(1, 1, 2, 500, 24), partition(2, 2, 500, 7)
    backend = NativeBackend(isa)
    clean = backend.mixed_covariance(*mixture(k, v, kv, 6))
    case = mixture(k, v, kv, 6)
    v[..., 5][kv.labels == 2] = torch.nan
    k[kv.labels == -1] = torch.nan
    slope, curve = backend.mixed_covariance(*case)
    others, channels = torch.arange(7) != 2, torch.arange(24) != 5
    assert torch.equal(slope[:, :, others], clean[0][:, :, others]) and torch.equal(curve, clean[1])
    assert bool((slope[:, :, 2, :, 5] == 0).all())
    torch.testing.assert_close(slope[:, :, 2][..., channels], clean[0][:, :, 2][..., channels])


def choices(
    *, groups: int = 30, single: int = 6, merged: int = 4
) -> tuple[Tensor, Tensor, Partition, Partition, Tensor, int, int, Tensor]:
    """Arguments of `choose_slots`: ties, empty groups, no rows in a query group, an unwanted head."""
    mass, cells = 4 * rows(0, 2, 4, 9, groups), chance(1, 2, 4, 9, groups) < 0.3
    mass[0, 0, 1, :20] = 1.5  # ties: the first ones win
    mass[0, 1, 2] -= 200.0
    if groups > single:  # else groups of no mass may be numbered in any order
        mass[1, 2, 3, :5] = -torch.inf
    cells[1, 0, 4] = True
    query = Partition.from_labels((chance(2, 2, 4, 80) * 8).long(), 9)
    kv = Partition.from_labels((chance(3, 2, 2, 200) * (groups - 1)).long(), groups)
    near = (chance(4, 2, 2, groups) * max(1, merged)).long()
    wanted = torch.ones(2, 4, dtype=torch.bool)
    wanted[1, 3] = False
    return mass, cells, query, kv, near, single, merged, wanted


@pytest.mark.parametrize("sizes", [(30, 6, 4), (30, 0, 4), (30, 29, 1), (5, 8, 0), (1, 1, 1)])
def test_slots_are_chosen_as_in_plain_torch(isa, sizes):
    groups, single, merged = sizes
    case = choices(groups=groups, single=single, merged=merged)
    for got, wanted in zip(
        NativeBackend(isa).choose_slots(*case), Portable().choose_slots(*case), strict=True
    ):  # fmt: skip
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_groups_that_are_always_kept_need_no_slot(isa):
    """Pinned keys are groups on top of those that may be skipped, each of which has a slot of its own."""
    case = choices(groups=9, single=8, merged=0)
    case[1][..., -1] = True
    for got, wanted in zip(
        NativeBackend(isa).choose_slots(*case), Portable().choose_slots(*case), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_more_skipped_groups_than_slots_are_refused(isa):
    case = choices(groups=9, single=3, merged=0)
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa).choose_slots(*case)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_mass_that_is_not_finite_gets_a_slot_of_its_own(isa, bad):
    case = choices()
    mass, cells, _, kv = case[:4]
    group = int((kv.sizes[0, 0] > 0).nonzero()[-1])
    mass[0, 1, 5, group], cells[0, 1, 5, group] = bad, False
    found, wanted = NativeBackend(isa).choose_slots(*case), Portable().choose_slots(*case)
    assert found[0][0, 1, 5, group] == 0
    assert torch.equal(found[0], wanted[0])
    for got, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_neighbourhoods_that_do_not_exist_are_refused(isa):
    case = choices()
    case[4][0, 1, 3] = 4
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa).choose_slots(*case)


def test_any_view_equals_its_contiguous_copy(isa):
    anchors, k, v, kv, slots, log_mass = slotted(40, 24, torch.bfloat16)
    backend = NativeBackend(isa)
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    flipped = [t.mT.contiguous().mT for t in (anchors, slots, log_mass)]
    for got, wanted in zip(
        backend.slot_means(flipped[0], *views, kv, *flipped[1:], SCALE),
        backend.slot_means(anchors, k, v, kv, slots, log_mass, SCALE),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    share, _, factor, _, _, centroids = mixture(k, v, kv, 6, 5)
    for got, wanted in zip(
        backend.mixed_covariance(share.mT.contiguous().mT, views[0], factor, views[1], kv, centroids),
        backend.mixed_covariance(share, k, factor, v, kv, centroids),
        strict=True,
    ):
        assert torch.equal(got, wanted)


def test_results_do_not_depend_on_the_number_of_threads(isa, threads):
    backend = NativeBackend(isa)
    q, k, v, route, extra = drifting(64, 96, torch.bfloat16, tokens=900)
    case = slotted(40, 64, tokens=1500, cq=41, groups=40)

    def run():
        yield from backend.attend(q, k, v, route, SCALE, extra)
        yield from backend.slot_means(*case, SCALE)
        yield from backend.mixed_covariance(*mixture(*case[1:4], 16, 41))
        yield from backend.choose_slots(*choices())

    results = []
    for count in (1, 2, 3, 7, 1):
        threads(count)
        results.append(list(run()))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))

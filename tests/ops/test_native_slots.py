"""Slots of a summary in the native backend, on every instruction set: their choice and their means."""

import pytest
import torch
from torch import Tensor

from residua.errors import RouteError
from residua.ops.backend import Backend, TorchBackend
from residua.ops.native import NativeBackend
from residua.types import Partition
from tests.support.native_library import needs_library, on_every_isa
from tests.support.summary_cases import DIMS, DTYPES, SCALE, chance, choices, drifting, mixture, rows, slotted

BASE = Backend()

pytestmark = [needs_library, on_every_isa]


def exact_slot_means(
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
    found = NativeBackend(isa).slot_summary(*case, SCALE)[:2]
    for got, low, wanted in zip(
        found, BASE.slot_summary(*case, SCALE)[:2], exact_slot_means(*case, SCALE), strict=True
    ):
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
        NativeBackend(isa).slot_summary(anchors, k, v, kv, slots, log_mass, scale)[:2],
        exact_slot_means(anchors, k, v, kv, slots, log_mass, scale),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_cells_of_no_slot_touch_nothing(isa):
    anchors, k, v, kv, slots, log_mass = slotted(64, 40)
    slots[..., 3] = -1
    slots[:, :, 5, 3] = 2  # one anchor that does see the group
    backend = NativeBackend(isa)
    clean = backend.slot_summary(anchors, k, v, kv, slots, log_mass, SCALE)
    skipped = kv.labels == 3
    assert skipped.any()
    k[skipped], v[skipped] = torch.nan, torch.inf
    others = torch.arange(anchors.shape[2]) != 5
    for got, wanted in zip(backend.slot_summary(anchors, k, v, kv, slots, log_mass, SCALE), clean, strict=True):
        assert torch.equal(got[:, :, others], wanted[:, :, others])
        assert bool(got[:, :, 5, 2].isnan().all()) and bool(got[:, :, 5, 1].isfinite().all())


def test_slots_of_nothing_are_zero(isa):
    anchors, k, v, kv, slots, log_mass = slotted(16, 24)
    nothing = torch.full_like(slots, -1), log_mass
    none_at_all = torch.full_like(slots, -1), log_mass[..., :0]
    for at, mass in (nothing, none_at_all):
        keys, values, _ = NativeBackend(isa).slot_summary(anchors, k, v, kv, at, mass, SCALE)
        assert keys.shape == (*mass.shape, 16) and values.shape == (*mass.shape, 24)
        assert bool((keys == 0).all()) and bool((values == 0).all())


@pytest.mark.parametrize("anchor,mass", [(1.0, -200.0), (1e30, -200.0), (0.0, 0.0), (0.0, -1e-3)])
def test_a_weight_is_at_most_a_share(isa, anchor, mass):
    """Rounding of huge or tied scores makes a key weigh more than its slot: then it weighs as much. The same
    in the native backend and in plain torch."""
    anchors, k, v, kv, slots, log_mass = slotted(16, 24)
    case = (anchors.abs() * anchor, k.abs(), v.abs(), kv, slots, torch.full_like(log_mass, mass), SCALE)
    for backend in (NativeBackend(isa), TorchBackend()):
        for got, wanted in zip(backend.slot_summary(*case)[:2], exact_slot_means(*case), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_huge_scores_make_no_sum_larger_than_all_its_keys(isa):
    anchors, k, v, kv, slots, _ = slotted(16, 24)
    anchors = anchors * 1e12  # scores of 1e12 are rounded by 1e5: exp of that would be infinite
    mass = BASE.cell_mass(anchors, k, kv, SCALE)
    log_mass = torch.stack([torch.where(slots == t, mass, -torch.inf).logsumexp(-1) for t in range(4)], -1)
    for backend in (NativeBackend(isa), TorchBackend()):
        keys, values, _ = backend.slot_summary(anchors, k, v, kv, slots, log_mass, SCALE)
        assert bool((keys.abs() <= k.abs().sum((0, 1, 2))).all())
        assert bool((values.abs() <= v.abs().sum((0, 1, 2))).all())


def test_slots_and_partitions_that_point_outside_are_refused(isa):
    anchors, k, v, kv, slots, log_mass = slotted(16, 16)
    slots[0, 1, 2, 3] = log_mass.shape[-1]
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa).slot_summary(anchors, k, v, kv, slots, log_mass, SCALE)
    kv.order[0, 1, 5] = k.shape[2]
    with pytest.raises(RouteError, match="from_labels"):
        NativeBackend(isa).slot_summary(anchors, k, v, kv, slots.clamp(max=1), log_mass, SCALE)
    with pytest.raises(RouteError, match="from_labels"):
        NativeBackend(isa)._mixed_covariance(*mixture(k, v, kv, 4))
    near = torch.zeros(1, 2, 10, dtype=torch.long)
    near[0, 1, 3] = log_mass.shape[-1]
    with pytest.raises(RouteError, match="slots"):
        NativeBackend(isa).slot_summary(anchors, k, v, kv, slots.clamp(max=1), log_mass, SCALE, near, 0)


def test_groups_may_be_visited_by_neighbourhood(isa):
    """The sums are the same but for the order in which they are added."""
    anchors, k, v, kv, _, _ = slotted(64, 40)
    near = (chance(6, 1, 2, 10) * 3).long()
    slots = near.repeat_interleave(2, dim=1)[:, :, None].expand(-1, -1, 13, -1).int()
    mass = BASE.cell_mass(anchors, k, kv, SCALE)
    log_mass = torch.stack([torch.where(slots == t, mass, -torch.inf).logsumexp(-1) for t in range(3)], -1)
    case = (anchors, k, v, kv, slots, log_mass, SCALE)
    for got, wanted in zip(NativeBackend(isa).slot_summary(*case, near, 0)[:2], exact_slot_means(*case), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("sizes", [(30, 6, 4), (30, 0, 4), (30, 29, 1), (5, 8, 0), (1, 1, 1)])
def test_slots_are_chosen_as_in_plain_torch(isa, sizes):
    groups, single, merged = sizes
    case = choices(groups=groups, single=single, merged=merged)
    for got, wanted in zip(NativeBackend(isa).choose_slots(*case), TorchBackend().choose_slots(*case), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_groups_that_are_always_kept_need_no_slot(isa):
    """Pinned keys are groups on top of those that may be skipped, each of which has a slot of its own."""
    case = choices(groups=9, single=8, merged=0)
    case[1][..., -1] = True
    for got, wanted in zip(NativeBackend(isa).choose_slots(*case), TorchBackend().choose_slots(*case), strict=True):
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
    found, wanted = NativeBackend(isa).choose_slots(*case), TorchBackend().choose_slots(*case)
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
        backend.slot_summary(flipped[0], *views, kv, *flipped[1:], SCALE),
        backend.slot_summary(anchors, k, v, kv, slots, log_mass, SCALE),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    share, _, factor, _, _, centroids = mixture(k, v, kv, 6, 5)
    for got, wanted in zip(
        backend._mixed_covariance(share.mT.contiguous().mT, views[0], factor, views[1], kv, centroids),
        backend._mixed_covariance(share, k, factor, v, kv, centroids),
        strict=True,
    ):
        assert torch.equal(got, wanted)


def test_results_do_not_depend_on_the_number_of_threads(isa, threads):
    backend = NativeBackend(isa)
    q, k, v, route, summary = drifting(64, 96, torch.bfloat16, tokens=900)
    case = slotted(40, 64, tokens=1500, cq=41, groups=40)

    def run():
        yield from backend.attend(q, k, v, route, SCALE, summary)
        yield from backend.slot_summary(*case, SCALE)
        yield from backend._mixed_covariance(*mixture(*case[1:4], 16, 41))
        yield from backend.choose_slots(*choices())

    results = []
    for count in (1, 2, 3, 7, 1):
        threads(count)
        results.append(list(run()))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))

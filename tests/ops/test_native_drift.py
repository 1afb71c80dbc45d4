"""Summary keys that drift from row to row, in the native backend on every instruction set."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from residua.ops.backend import TorchBackend
from residua.ops.native import NativeBackend
from residua.ops.reference import Reference
from residua.types import MAX_BEND, Route, SummaryKeys
from tests.support.native_library import needs_library, on_every_isa
from tests.support.summary_cases import BARE, DIMS, DTYPES, OFF, SCALE, drifting

pytestmark = [needs_library, on_every_isa]


def exact_attend(q: Tensor, k: Tensor, v: Tensor, route: Route, scale: float, summary: SummaryKeys):
    return Reference().attend(q.double(), k.double(), v.double(), route, scale, summary)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, route: Route, scale: float, summary: SummaryKeys) -> Tensor:
    """Attention over kept and summary keys by torch in the dtype of q: the error that is allowed twice."""
    assert summary.drift is not None
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        for a in range(route.query.groups):
            own, labels = route.query.labels[0, h] == a, route.kv.labels[0, g]
            seen = route.cells[0, h, a][labels.clamp(min=0)] & (labels >= 0)
            on = summary.log_weight[0, h, a] > -torch.inf
            more, values, weight, basis, origin, curve, slope = (
                t.to(q.dtype)
                for t in (
                    summary.keys[0, h, a][on],
                    summary.values[0, h, a][on],
                    summary.log_weight[0, h, a][on],
                    summary.drift.basis[0, g],
                    summary.drift.origin[0, h, a],
                    summary.drift.curve[0, h, a],
                    summary.drift.slope[0, h, a],
                )
            )
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
    q, k, v, route, summary = drifting(dim, value_dim, dtype)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, summary)
    wanted, wanted_lse = exact_attend(q, k, v, route, SCALE, summary)
    allowed = (plain_attend(q, k, v, route, SCALE, summary).double() - wanted).norm()
    error = (out.double() - wanted).norm()
    assert error <= 2 * allowed + 1e-6 * wanted.norm(), f"error {error:.3g}, plain torch has {allowed:.3g}"
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-5)
    still, still_lse = exact_attend(q, k, v, route, SCALE, replace(summary, drift=None))
    assert (still - wanted).norm() > 0.05 * wanted.norm() and (still_lse != wanted_lse).any()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("rank", [1, 5, 70])
def test_drift_at_any_scale_and_rank(isa, scale, rank):
    q, k, v, route, summary = drifting(20, 24, count=70, rank=rank)
    out, lse = NativeBackend(isa).attend(q, k, v, route, scale, summary)
    wanted, wanted_lse = exact_attend(q, k, v, route, scale, summary)
    assert (out.double() - wanted).norm() <= 2e-6 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drift_without_summary_keys_touches_nothing(isa, dtype):
    q, k, v, route, summary = drifting(64, 64, dtype)
    drift = summary.drift
    for part in (drift.origin, drift.curve, drift.slope):
        part[:, :, OFF] = torch.nan
    backend, group = NativeBackend(isa), route.query.labels == OFF
    with_drift = backend.attend(q, k, v, route, SCALE, summary)
    without = backend.attend(q, k, v, route, SCALE)
    assert group.any()
    for got, wanted in zip(with_drift, without, strict=True):
        assert torch.equal(got[group], wanted[group]) and not bool(got.isnan().any())


@pytest.mark.parametrize("weight", [-150.0, 150.0])
def test_drift_of_a_summary_that_is_nothing_or_everything(isa, weight):
    q, k, v, route, summary = drifting(64, 64)
    summary = replace(summary, log_weight=summary.log_weight + weight)
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, summary)
    wanted, wanted_lse = exact_attend(q, k, v, route, SCALE, summary)
    assert (out.double() - wanted).norm() <= 1e-5 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("where", "bad"),
    [(where, bad) for where in ("q", "basis", "origin", "slope") for bad in (torch.nan, torch.inf, -torch.inf)]
    + [("curve", torch.nan), ("curve", torch.inf)],  # it is never negative
)
def test_non_finite_drift_spreads_as_in_torch(isa, dtype, where, bad):
    q, k, v, route, summary = drifting(24, 20, dtype)
    if where == "q":
        q[0, 1, 77, 13] = bad
    else:
        getattr(summary.drift, where)[0, 1, BARE, 1] = bad
    out, lse = NativeBackend(isa).attend(q, k, v, route, SCALE, summary)
    wanted, wanted_lse = TorchBackend().attend(q, k, v, route, SCALE, summary)
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.isinf(), wanted.isinf())
    assert torch.equal(lse.isnan(), wanted_lse.isnan())

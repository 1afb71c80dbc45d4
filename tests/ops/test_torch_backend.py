"""The torch backend on given routes: the answers of the oracle, within twice the error of a plain low-precision
run."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua import Partition, Route, SummaryKeys
from residua.api import attend_route
from residua.types import Drift
from tests.support.oracle import expand_heads, masked_attention, normal, qkv, random_route, route_mask, worst

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plain(q, k, v, mask):
    """Masked attention as one would write it in torch, every step in the tensors' own precision."""
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf)
    return torch.nan_to_num(logits.softmax(-1), 0.0) @ v


def check_twice_rule(q, k, v, route):
    mask = route_mask(route, q.shape[2], k.shape[2])
    judge, lse = attend_route(q.double(), k.double(), v.double(), route, backend="reference")
    found, found_lse = attend_route(q, k, v, route, backend="torch")
    assert found.dtype == q.dtype and found_lse.dtype == torch.float32
    allowed = 2 * worst(plain(q, k, v, mask), judge)
    # a plain run can be exact by luck, where a row sees one key; the type's rounding is always allowed
    assert worst(found, judge) <= max(allowed, torch.finfo(q.dtype).eps)
    assert torch.allclose(found_lse, lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries, keys", [(1, 1), (2, 1), (63, 97), (97, 63), (1025, 131), (127, 1025), (1, 500)])
def test_twice_rule_at_odd_lengths(dtype, queries, keys):
    q, k, v = qkv(2, 2, 1, queries, keys, 24, 40, seed=queries, dtype=dtype)
    route = random_route(2, 2, 1, queries, keys, min(6, queries), min(9, keys), seed=keys)
    check_twice_rule(q, k, v, route)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["large", "fp16 extremes", "all equal", "tiny"])
def test_twice_rule_at_extreme_values(dtype, kind):
    q, k, v = qkv(1, 2, 2, 90, 110, 16, dtype=torch.float64)
    if kind == "large":
        q, k = q * 100 / q.norm(dim=-1, keepdim=True), k * 400 / k.norm(dim=-1, keepdim=True)  # logits to 1e4
    elif kind == "fp16 extremes":
        v = v.sign() * 65504
    elif kind == "all equal":
        q, k = torch.ones_like(q), torch.ones_like(k)
    else:
        q, v = q * 1e-6, v * 1e-4
    route = random_route(seed=6)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    out, _ = attend_route(q, k, v, route, backend="torch")
    assert out.isfinite().all()
    check_twice_rule(q, k, v, route)


def test_a_row_of_a_group_with_nothing_kept_gets_zero_and_minus_infinity():
    q, k, v = qkv(1, 2, 2, 90, 110)
    route = random_route(seed=3)
    cells = route.cells.clone()
    cells[0, 1, 2] = False
    for backend in ("torch", "reference"):
        out, lse = attend_route(q, k, v, Route(route.query, route.kv, cells), backend=backend)
        rows = route.query.labels[0, 1] == 2
        assert rows.any() and not out[0, 1, rows].any() and (lse[0, 1, rows] == -math.inf).all()
        assert torch.equal(out[0, 0], attend_route(q, k, v, route, backend=backend)[0][0, 0])


def test_empty_groups_on_both_sides():
    q, k, v = qkv(1, 1, 1, 30, 40)
    query, kv = (torch.arange(30) % 2 * 3).view(1, 1, 30), (torch.arange(40) % 3 * 2).view(1, 1, 40)
    cells = torch.rand(1, 1, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    route = Route(Partition.from_labels(query, 5), Partition.from_labels(kv, 6), cells)
    out, _ = attend_route(q, k, v, route, backend="torch")
    wanted, _ = masked_attention(q, k, v, route_mask(route, 30, 40))
    assert worst(out, wanted) < 1e-6


def test_only_the_first_kv_group_kept():
    q, k, v = qkv(1, 2, 2, 90, 110)
    route = random_route(seed=8)
    cells = torch.zeros_like(route.cells)
    cells[..., 0] = True
    out, lse = attend_route(q, k, v, Route(route.query, route.kv, cells), backend="torch")
    mask = (route.kv.labels == 0)[:, :, None].expand(-1, -1, 90, -1)
    wanted, wanted_lse = masked_attention(q, k, v, mask)
    assert worst(out, wanted) < 1e-6 and torch.allclose(lse.double(), wanted_lse, atol=1e-5)
    assert worst(out, masked_attention(q, k, v)[0]) > 0.1


def test_one_group_with_nearly_all_tokens(monkeypatch):
    """Also when its rows must be cut into many pieces."""
    q, k, v = qkv(1, 1, 1, 500, 600)
    query = torch.where(torch.arange(500) < 5, torch.arange(500), 5).view(1, 1, 500)
    kv = torch.where(torch.arange(600) < 6, torch.arange(600), 6).view(1, 1, 600)
    cells = torch.ones(1, 1, 6, 7, dtype=torch.bool)
    cells[0, 0, 5, :3] = False
    route = Route(Partition.from_labels(query, 6), Partition.from_labels(kv, 7), cells)
    wanted, _ = masked_attention(q, k, v, route_mask(route, 500, 600))
    assert worst(attend_route(q, k, v, route, backend="torch")[0], wanted) < 1e-6
    monkeypatch.setattr("residua.ops.matrices.CHUNK_BYTES", 4 * 600 * 7)
    assert worst(attend_route(q, k, v, route, backend="torch")[0], wanted) < 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_stands_in_skipped_groups_does_not_matter(value, backend):
    q, k, v = qkv(1, 2, 2, 90, 110)
    route = random_route(seed=5, lowest=-1)
    cells = route.cells.clone()
    cells[..., 3] = False  # nobody keeps group 3; label -1 is padding
    route = Route(route.query, route.kv, cells)
    hidden = ((route.kv.labels == 3) | (route.kv.labels == -1))[..., None]
    assert hidden.any()
    clean = attend_route(q, k, v, route, backend=backend)
    dirty = attend_route(q, torch.where(hidden, value, k), torch.where(hidden, value, v), route, backend=backend)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("with_extra", [False, True])
def test_nan_reaches_only_the_rows_that_keep_it(backend, with_extra):
    q, k, v = qkv(1, 2, 2, 90, 110)
    route = random_route(seed=5, lowest=-1)
    summary = SummaryKeys(normal(1, 2, 5, 2, 16), normal(1, 2, 5, 2, 16, seed=1), torch.zeros(1, 2, 5, 2))
    v[0, 0, 17], k[0, 1, 40] = math.nan, math.nan
    out, _ = attend_route(q, k, v, route, backend=backend, summary=summary if with_extra else None)
    mask = route_mask(route, 90, 110)
    lost = torch.stack([mask[0, 0, :, 17], mask[0, 1, :, 40]])
    assert lost.any() and not lost.all()
    assert torch.equal(out[0].isnan().all(-1), lost) and torch.equal(out[0].isnan().any(-1), lost)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_summary_keys(dtype, keep):
    """Beside kept cells, and alone; one of them switched off, with NaN behind the switch."""
    q, k, v = qkv(2, 4, 2, 50, 60, 8, 5, dtype=dtype)
    route = random_route(2, 4, 2, 50, 60, 4, 5, keep, seed=9, lowest=-1)
    keys, values = normal(2, 4, 4, 3, 8, seed=11, dtype=dtype), normal(2, 4, 4, 3, 5, seed=12, dtype=dtype)
    log_weight = 2 + normal(2, 4, 4, 3, seed=13)
    log_weight[..., 1] = -math.inf
    judge = attend_route(
        q.double(),
        k.double(),
        v.double(),
        route,
        backend="reference",
        summary=SummaryKeys(keys.double(), values.double(), log_weight),
    )
    keys[..., 1, :] = values[..., 1, :] = math.nan
    out, lse = attend_route(q, k, v, route, backend="torch", summary=SummaryKeys(keys, values, log_weight))
    assert worst(out, judge[0]) <= 2 * torch.finfo(dtype).eps + 1e-6
    assert torch.allclose(lse, judge[1], atol=1e-4)
    without, _ = attend_route(q, k, v, route, backend="torch")
    assert worst(out, without.double()) > 0.05


def drifting(dtype=torch.float32, curve=0.1):
    """Extra keys of 4 query groups that drift in 3 directions; 2 K/V heads serve 4."""
    keys, values = normal(2, 4, 4, 3, 8, seed=11, dtype=dtype), normal(2, 4, 4, 3, 5, seed=12, dtype=dtype)
    log_weight = 2 + normal(2, 4, 4, 3, seed=13)
    log_weight[..., 1] = -math.inf
    log_weight[0, 2, 1] = -math.inf  # a group without any
    drift = Drift(
        normal(2, 2, 8, 3, seed=14),
        normal(2, 4, 4, 3, seed=15),
        curve * normal(2, 4, 4, 3, seed=16).abs(),
        normal(2, 4, 4, 3, 5, seed=17),
    )
    return SummaryKeys(keys, values, log_weight, drift)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("keep", [0.5, 0.0])
@pytest.mark.parametrize("curve", [1e-3, 0.1])
def test_summary_keys_that_drift(dtype, keep, curve, monkeypatch):
    """As the judge does, also where the second order is cut off, and in pieces."""
    q, k, v = qkv(2, 4, 2, 50, 60, 8, 5, dtype=dtype)
    route = random_route(2, 4, 2, 50, 60, 4, 5, keep, seed=9, lowest=-1)
    summary = drifting(dtype, curve)
    own = [
        torch.take_along_dim(x.double(), route.query.labels.clamp(min=0)[..., None], 2)
        for x in (summary.drift.origin, summary.drift.curve)
    ]
    y = q.double() @ summary.drift.basis.double().repeat_interleave(2, 1) - own[0]
    assert ((y.square() * own[1]).sum(-1) > 0.5).any() == (curve == 0.1)
    judge = attend_route(q.double(), k.double(), v.double(), route, backend="reference", summary=summary)
    out, lse = attend_route(q, k, v, route, backend="torch", summary=summary)
    allowed = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps + 3e-6
    assert worst(out, judge[0]) <= allowed and torch.allclose(lse, judge[1], atol=1e-4)
    still = SummaryKeys(summary.keys, summary.values, summary.log_weight)
    assert worst(attend_route(q, k, v, route, backend="torch", summary=still)[0], judge[0]) > 0.02
    monkeypatch.setattr("residua.ops.matrices.CHUNK_BYTES", 4 * 60 * 3)
    pieces, _ = attend_route(q, k, v, route, backend="torch", summary=summary)
    assert worst(pieces, judge[0]) <= allowed


def test_drift_with_nothing_switched_on_changes_nothing():
    q, k, v = qkv(2, 4, 2, 50, 60, 8, 5)
    route = random_route(2, 4, 2, 50, 60, 4, 5, seed=9, lowest=-1)
    summary = drifting()
    off = SummaryKeys(summary.keys, summary.values, torch.full_like(summary.log_weight, -math.inf), summary.drift)
    for backend in ("torch", "reference"):
        with_off, without = (attend_route(q, k, v, route, backend=backend, summary=x) for x in (off, None))
        assert worst(with_off[0], without[0].double()) < 1e-6
        assert torch.allclose(with_off[1], without[1], atol=1e-5)


def test_an_summary_key_stands_for_many():
    """m copies of a key in a skipped group are one summary key with log-weight log m."""
    q, k, v = qkv(1, 1, 1, 20, 40)
    k[0, 0, 30:], v[0, 0, 30:] = k[0, 0, 30], v[0, 0, 30]
    kv = Partition.from_labels((torch.arange(40) >= 30).long().view(1, 1, 40), 2)
    query = Partition.from_labels(torch.zeros(1, 1, 20, dtype=torch.long), 1)
    route = Route(query, kv, torch.tensor([[[[True, False]]]]))
    summary = SummaryKeys(k[:, :, None, 30:31], v[:, :, None, 30:31], torch.full((1, 1, 1, 1), math.log(10)))
    out, _ = attend_route(q, k, v, route, backend="torch", summary=summary)
    assert worst(out, masked_attention(q, k, v)[0]) < 1e-6


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_the_output_type_can_be_chosen(out_dtype):
    q, k, v = qkv(1, 2, 2, 90, 110, dtype=torch.bfloat16)
    out, _ = attend_route(q, k, v, random_route(), backend="torch", out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)


@given(st.integers(0, 10_000))
def test_a_permutation_of_the_tokens_permutes_the_rows(seed):
    q, k, v = qkv(1, 1, 1, 25, 30, 4, seed=seed, dtype=torch.float64)
    route = random_route(1, 1, 1, 25, 30, seed=seed, lowest=-1)
    generator = torch.Generator().manual_seed(seed)
    rows, keys = torch.randperm(25, generator=generator), torch.randperm(30, generator=generator)
    moved = Route(
        Partition.from_labels(route.query.labels[..., rows], 5),
        Partition.from_labels(route.kv.labels[..., keys], 7),
        route.cells,
    )
    first, lse = attend_route(q, k, v, route, backend="torch")
    second, moved_lse = attend_route(q[:, :, rows], k[:, :, keys], v[:, :, keys], moved, backend="torch")
    assert torch.allclose(first[:, :, rows], second, atol=1e-12)
    assert torch.allclose(lse[..., rows], moved_lse, atol=1e-6)


def test_shared_heads_equal_expanded_heads():
    q, k, v = qkv(2, 6, 2, 70, 80)
    route = random_route(2, 6, 2, 70, 80, seed=3)
    spread = Partition.from_labels(expand_heads(route.kv.labels, 6), route.kv.groups)
    expanded = Route(route.query, spread, route.cells)
    shared = attend_route(q, k, v, route, backend="torch")
    other = attend_route(q, expand_heads(k, 6), expand_heads(v, 6), expanded, backend="torch")
    assert torch.equal(shared[0], other[0]) and torch.equal(shared[1], other[1])

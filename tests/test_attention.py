"""The whole call: recomputed stage by stage in fp64, dense at density 1, and calls at the edge of sense."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import residua
from residua import Config, attention
from residua.method.grouping.partition import group_tokens
from residua.method.inputs import validate
from residua.method.reconstructions import RECONSTRUCTIONS
from residua.method.route import route_cells
from residua.method.stages import SizedCall
from residua.ops import backends
from residua.ops.backend import Backend
from tests.support.oracle import (
    choose_probes,
    closed_form,
    masked_attention,
    paper,
    predicted,
    qkv,
    route_mask,
    small,
    worst,
)
from tests.support.pairwise import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stages(q, k, v, config):
    call = validate(q, k, v)
    sized = SizedCall.of(call, config, Backend())
    grouping = group_tokens(sized)
    return grouping, route_cells(sized.grouped(grouping)).route


@pytest.mark.parametrize("partition", ["response", "key-response", "semantic"])
@pytest.mark.parametrize("subspace", [True, False])
@pytest.mark.parametrize("dim, value_dim", [(16, 16), (16, 40)])
def test_the_output_is_the_papers_formula(partition, subspace, dim, value_dim):
    """Given the groups and the route: hard drop, probes, fit and final output, each written out in fp64."""
    q, k, v = qkv(2, 4, 2, 300, 280, dim, value_dim)
    config = paper(partition=partition, subspace=subspace)
    out = attention(q, k, v, config)
    grouping, route = stages(q, k, v, config)
    dense, _ = masked_attention(q, k, v)
    sparse, _ = masked_attention(q, k, v, route_mask(route, 300, 280))
    for b in range(2):
        for h in range(4):
            labels = grouping.query.labels[b, h].tolist()
            rows = choose_probes(grouping.coordinates[b, h], labels, 8, 16)
            chosen = [labels[i] for i in rows]
            weights = [labels.count(a) / chosen.count(a) for a in chosen]
            residual = (dense - sparse)[b, h, rows]
            fitted = closed_form(sparse[b, h, rows], residual, weights, 0.1, 4 if subspace else None)
            wanted = sparse[b, h] + torch.from_numpy(predicted(sparse[b, h], fitted))
            wanted[rows] = dense[b, h, rows]
            assert worst(out[b, h], wanted) < 2e-4
            assert torch.allclose(out[b, h, rows].double(), dense[b, h, rows], atol=1e-5)


@pytest.mark.parametrize("score", ["mass", "centroid"])
def test_without_reconstruction_it_is_hard_drop(score):
    q, k, v = qkv(2, 4, 2, 300, 280)
    config = small(reconstruction="none", score=score)
    out, receipt = attention(q, k, v, config, return_receipt=True)
    _, route = stages(q, k, v, config)
    wanted, _ = masked_attention(q, k, v, route_mask(route, 300, 280))
    assert worst(out, wanted) < 1e-6
    assert receipt.pairs.probe == 0 and receipt.error is None
    assert torch.equal(out, attention(q, k, v, paper(probes=0, score=score)))


@pytest.mark.parametrize(
    "dtype, lengths, backend, reconstruction, rules",
    pairwise(
        DTYPES,
        [(1, 1), (2, 3), (63, 63), (97, 63), (130, 257), (1025, 97)],
        ["torch", "reference", "native"],
        ["probe", "anchored"],
        ["cpu", "gpu"],
    ),
)
def test_density_one_is_dense(dtype, lengths, backend, reconstruction, rules):
    if backends()[backend].unavailable():
        pytest.skip(str(backends()[backend].unavailable()))
    queries, keys = lengths
    q, k, v = qkv(2, 2, 1, queries, keys, 12, 20, dtype=dtype)
    dense, _ = masked_attention(q, k, v)
    config = Config(density=1.0, backend=backend, reconstruction=reconstruction, rules=rules)
    out, receipt = attention(q, k, v, config, return_receipt=True)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert out.dtype == dtype and out.shape == (2, 2, queries, 20)
    assert worst(out, dense) <= max(2 * worst(plain, dense), torch.finfo(dtype).eps)
    assert receipt.density == 1.0 and receipt.pairs.probe == 0 and receipt.routing_products == 0


@pytest.mark.parametrize("reconstruction", sorted(RECONSTRUCTIONS))
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.3, 0.9]))
def test_one_cell_of_everything_is_dense_and_reconstruction_changes_nothing(
    reconstruction, seed, queries, keys, density
):
    """With one K/V group every row sees every key: the residual is zero, and so is its reconstruction."""
    q, k, v = qkv(1, 1, 1, queries, keys, 4, seed=seed)
    config = small(reconstruction=reconstruction, kv_groups=1, query_groups=min(8, queries), density=density)
    out, receipt = attention(q, k, v, config, return_receipt=True)
    assert worst(out, masked_attention(q, k, v)[0]) < 1e-5
    assert receipt.pairs.routed == queries * keys
    assert receipt.error is None or receipt.error < 1e-4


@pytest.mark.parametrize(
    "dtype, lengths, density, reconstruction, rules",
    pairwise(
        DTYPES,
        [(1, 1), (2, 2), (63, 97), (1025, 1025), (257, 64), (1, 700)],
        [0.22, 0.6],
        ["probe", "tail", "anchored"],
        ["cpu", "gpu"],
    ),
)
def test_any_length_gives_a_finite_output_of_the_right_type(dtype, lengths, density, reconstruction, rules):
    queries, keys = lengths
    q, k, v = qkv(1, 2, 1, queries, keys, dtype=dtype)
    config = Config(density=density, backend="torch", reconstruction=reconstruction, rules=rules)
    out, receipt = attention(q, k, v, config, return_receipt=True)
    assert out.shape == q.shape and out.dtype == dtype and out.isfinite().all() and out.is_contiguous()
    assert 0 < receipt.density <= 1


@pytest.mark.parametrize("shape", [(0, 2, 5, 6), (1, 2, 0, 6), (1, 2, 5, 0), (1, 0, 5, 6), (2, 2, 0, 0)])
def test_empty_calls(shape):
    batch, heads, queries, keys = shape
    q, k, v = (
        torch.ones(batch, heads, queries, 8),
        torch.ones(batch, heads, keys, 8),
        torch.ones(batch, heads, keys, 4),
    )
    out, receipt = attention(q, k, v, return_receipt=True)
    assert out.shape == (batch, heads, queries, 4) and not out.any()
    assert receipt.density == 0.0 and receipt.pairs.total == 0


def test_more_groups_than_tokens_are_clamped():
    q, k, v = qkv(queries=40, keys=30)
    config = small(query_groups=4000, kv_groups=5000, density=0.5)
    out, receipt = attention(q, k, v, config, return_receipt=True)
    assert out.isfinite().all() and receipt.groups == (40, 30)
    assert [note.split()[0] for note in receipt.notes][:2] == ["query_groups=4000", "kv_groups=5000"]


@pytest.mark.parametrize("which", ["q", "k", "qk", "qkv"])
def test_identical_tokens(which):
    tensors = dict(zip("qkv", qkv(queries=200), strict=True))
    for name in which:
        tensors[name] = torch.ones_like(tensors[name])
    out = attention(**tensors, config=small())
    assert out.isfinite().all()
    if "k" in which:  # all keys in one group: nothing can be skipped
        assert worst(out, masked_attention(**tensors)[0]) < 1e-5


@pytest.mark.parametrize("which", ["q", "k", "qk"])
@pytest.mark.parametrize("reconstruction", sorted(RECONSTRUCTIONS))
@pytest.mark.usefixtures("every_backend")
def test_no_cell_of_an_empty_group_reaches_a_backend(which, reconstruction, monkeypatch):
    """Identical tokens all join one group; the others are empty."""
    tensors = dict(zip("qkv", qkv(queries=200), strict=True))
    for name in which:
        tensors[name] = torch.ones_like(tensors[name])
    seen = []
    for backend in backends().values():

        def watched(q, k, v, route, *rest, attend=backend.attend, **more):
            seen.append(route)
            return attend(q, k, v, route, *rest, **more)

        monkeypatch.setattr(backend, "attend", watched)
    attention(**tensors, config=small(reconstruction=reconstruction))
    routes = [route for route in seen if route.cells.shape[-1]]  # probes see the summary alone as well
    assert routes
    for route in routes:
        empty = (route.query.sizes == 0)[..., None] | (route.kv.sizes == 0)[..., None, :]
        assert empty.any() and route.cells.any() and not (route.cells & empty).any()


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.usefixtures("every_backend")
def test_one_group_with_nearly_all_tokens(side):
    q, k, v = qkv(queries=400)
    many = q if side == "q" else k
    many[:, :, 4:] = many[:, :, 4:5]
    many[:, :, :4] *= 10
    config = small(query_groups=5, kv_groups=5, reconstruction="none")
    grouping, route = stages(q, k, v, config)
    assert int((grouping.query if side == "q" else grouping.kv).sizes.max()) >= 396
    wanted, _ = masked_attention(q, k, v, route_mask(route, 400, 400))
    assert worst(attention(q, k, v, config), wanted) < 1e-5
    for reconstruction in ("probe", "tail", "anchored"):
        out = attention(q, k, v, config.replace(reconstruction=reconstruction))
        assert out.isfinite().all()


def test_a_density_below_the_minimum_keeps_the_minimum_and_says_so():
    out, receipt = attention(*qkv(), small(density=1e-7), return_receipt=True)
    assert out.isfinite().all() and receipt.density > 1e-7
    assert any("above the target" in note for note in receipt.notes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_ten_thousand(dtype):
    q, k, v = qkv(queries=200, dtype=torch.float64)
    q = (q * 200 / q.norm(dim=-1, keepdim=True)).to(dtype)
    k = (k * 200 / k.norm(dim=-1, keepdim=True)).to(dtype)
    assert (q.double() @ k.double().mT / 4).abs().max() > 8e3
    for density in (0.3, 1.0):
        assert attention(q, k, v.to(dtype), small(density=density)).isfinite().all()
    dense, _ = masked_attention(q, k, v.to(dtype))
    out = attention(q, k, v.to(dtype), small(density=1))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v.to(dtype))
    assert worst(out, dense) <= max(2 * worst(plain, dense), torch.finfo(dtype).eps)


def test_fp16_values_at_the_end_of_the_range_stay_finite():
    q, k, v = qkv(queries=300, dtype=torch.float16)
    out = attention(4 * q, k, v.sign() * 65504, small())
    assert out.isfinite().all()


def test_the_scale_is_used_everywhere():
    q, k, v = qkv()
    config = small()
    assert torch.allclose(attention(q, k, v, config, scale=0.7), attention(q * 0.7 * 4, k, v, config), atol=1e-4)
    out = attention(q, k, v, small(density=1), scale=0.7)
    assert worst(out, masked_attention(q, k, v, scale=0.7)[0]) < 1e-5


def test_heads_and_batches_do_not_see_each_other():
    q, k, v = qkv(2, 3, 3, 200)
    out = attention(q, k, v, small())
    for b in range(2):
        for h in range(3):
            cut = (slice(b, b + 1), slice(h, h + 1))
            assert torch.allclose(attention(q[cut], k[cut], v[cut], small()), out[cut], atol=1e-5)


def test_more_density_means_less_error():
    q, k, v = qkv(queries=600)
    dense, _ = masked_attention(q, k, v)
    for reconstruction in ("none", "probe", "tail", "anchored"):
        errors = [
            float((attention(q, k, v, small(density=d, reconstruction=reconstruction)).double() - dense).norm())
            for d in (0.15, 0.35, 0.6, 0.9)
        ]
        assert errors == sorted(errors, reverse=True)


def test_fp64_comes_in_and_goes_out():
    q, k, v = qkv(dtype=torch.float64)
    assert attention(q, k, v, small()).dtype == torch.float64
    assert worst(attention(q, k, v, small(density=1)), masked_attention(q, k, v)[0]) < 1e-12


def test_the_error_estimate_tells_good_calls_from_bad():
    """Random probes: the estimate is of the size of the true error, and grows with it. (A row whose output
    is next to nothing would decide a mean of relative errors alone: the values keep away from zero.)"""
    q, k, v = qkv(queries=900, dim=8)
    v = v + 1
    dense, _ = masked_attention(q, k, v)
    pairs = []
    for density in (0.2, 0.5, 0.95):
        config = paper(density=density, probe_policy="random", probes=48)
        out, receipt = attention(q, k, v, config, return_receipt=True)
        true = float(((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean())
        pairs.append((receipt.error, true))
        assert receipt.error_per_head.shape == (1, 2)
        assert math.isclose(receipt.error, float(receipt.error_per_head.mean()), rel_tol=1e-5)
    for estimate, true in pairs[:2]:  # where little is skipped, few rows make the error and probes miss them
        assert 0.4 * true < estimate < 2.5 * true
    assert pairs[0][0] > pairs[1][0] > pairs[2][0]


def test_one_probe_that_was_fitted_gives_no_estimate():
    """It is left with no error of its own, which must not read as an error of zero."""
    for config, estimates in ((paper(probes=1), False), (paper(probes=2), True), (paper(probes=0), False)):
        _, receipt = attention(*qkv(), config, return_receipt=True)
        assert (receipt.error is not None) == (receipt.error_per_head is not None) == estimates


def test_the_defaults_need_no_config():
    q, k, v = qkv(queries=300)
    out = residua.attention(q, k, v)
    assert torch.is_tensor(out) and out.shape == q.shape
    assert torch.equal(out, residua.attention(q, k, v, Config(), None, return_receipt=True)[0])

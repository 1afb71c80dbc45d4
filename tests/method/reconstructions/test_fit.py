"""The fit against closed forms in fp64: weighted ridge, probe-residual subspace, leave-one-out errors, and
what becomes of NaN and Inf (the paper's section 4.2, appendix A)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.method.reconstructions import apply_fit, estimate_error
from residua.ops.backend import Backend
from residua.types import Probes, ResidualFit
from tests.support.oracle import closed_form, normal, predicted

SHAPES = [(40, 12), (12, 40), (20, 20)]  # more probes than channels, fewer, as many


def fit(x, residual, weights, rank, ridge, subspace=True):
    return Backend().fit_residual(x, residual, weights, rank, ridge, subspace)


def problem(probes, dim, seed=0):
    """Probe outputs of unequal spread, residuals that follow them with noise, uneven weights."""
    x = normal(probes, dim, seed=seed, dtype=torch.float64) * torch.linspace(0.2, 2, dim) + 1
    mix = normal(dim, dim, seed=seed + 1, dtype=torch.float64) / dim**0.5
    residual = 0.3 * x @ mix + 0.1 * normal(probes, dim, seed=seed + 2, dtype=torch.float64)
    weights = 1 + 50 * torch.rand(probes, generator=torch.Generator().manual_seed(seed)).double()
    return x, residual, weights


@pytest.mark.parametrize("probes, dim", SHAPES)
@pytest.mark.parametrize("ridge", [0.01, 0.1, 30.0])
def test_ridge_is_the_closed_form(probes, dim, ridge):
    x, residual, weights = problem(probes, dim)
    new = normal(25, dim, seed=9, dtype=torch.float64)
    found = fit(x, residual, weights, 16, ridge, subspace=False).predict(new)
    wanted = predicted(new, closed_form(x, residual, weights, ridge))
    assert np.allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("probes, dim", SHAPES)
@pytest.mark.parametrize("rank", [1, 4, 11])
def test_subspace_is_the_leading_right_singular_vectors(probes, dim, rank):
    x, residual, weights = problem(probes, dim, seed=3)
    new = normal(25, dim, seed=9, dtype=torch.float64)
    found = fit(x, residual, weights, rank, 0.1)
    wanted = predicted(new, closed_form(x, residual, weights, 0.1, rank))
    assert found.left.shape == (dim, rank) and found.right.shape == (rank, dim)
    assert np.allclose(found.predict(new).numpy(), wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    # the part that depends on x stays inside the span of the probe residuals
    moved = (found.predict(new) - found.predict(new[:1])).double().numpy()
    alpha = (weights / weights.sum()).numpy()
    centred = np.sqrt(alpha)[:, None] * (residual.numpy() - alpha @ residual.numpy())
    psi = np.linalg.svd(centred, full_matrices=False)[2][:rank].T
    assert np.allclose(moved @ psi @ psi.T, moved, atol=1e-4 * np.abs(moved).max())


def test_batches_are_fitted_one_by_one():
    parts = [problem(20, 8, seed) for seed in range(6)]
    x, residual, weights = (torch.stack(t).unflatten(0, (2, 3)) for t in zip(*parts, strict=True))
    together = fit(x, residual, weights, 4, 0.1)
    for i, part in enumerate(parts):
        alone = fit(*part, 4, 0.1)
        b, h = divmod(i, 3)
        assert torch.allclose(alone.predict(part[0]), together.predict(x)[b, h], atol=1e-5)
        assert torch.allclose(alone.left_out, together.left_out[b, h], atol=1e-5)


@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_only_the_ratios_of_the_weights_matter(seed, factor):
    x, residual, weights = problem(15, 6, seed)
    first, second = (fit(x, residual, w, 4, 0.1).predict(x) for w in (weights, factor * weights))
    assert torch.allclose(first, second, atol=1e-5)


@given(st.integers(0, 10_000), st.sampled_from(SHAPES), st.booleans())
def test_no_residual_means_no_correction(seed, shape, subspace):
    x, _, weights = problem(*shape, seed)
    found = fit(x, torch.zeros_like(x), weights, 4, 0.1, subspace)
    assert not found.predict(100 * normal(7, shape[1], seed=seed)).any()
    assert not found.left_out.any()


@given(st.integers(0, 10_000), st.sampled_from(SHAPES), st.booleans())
def test_a_constant_residual_is_met_exactly(seed, shape, subspace):
    x, _, weights = problem(*shape, seed)
    constant = normal(shape[1], seed=seed)
    found = fit(x, constant.expand_as(x), weights, 4, 0.1, subspace)
    assert torch.allclose(found.predict(5 * x), constant.expand_as(x).float(), atol=1e-5)


def test_an_affine_residual_is_met_when_probes_suffice():
    x, _, weights = problem(200, 6)
    matrix, bias = normal(6, 6, seed=4, dtype=torch.float64), normal(6, seed=5, dtype=torch.float64)
    found = fit(x, x @ matrix + bias, weights, 6, 1e-9)
    new = normal(30, 6, seed=6, dtype=torch.float64)
    assert torch.allclose(found.predict(new).double(), new @ matrix + bias, atol=1e-4)


@pytest.mark.parametrize("probes, dim", SHAPES)
def test_left_out_errors_are_those_of_refitting(probes, dim):
    """Every probe left out in turn, weights and feature scale as they were, refitted with an intercept."""
    x, residual, weights = problem(probes, dim, seed=5)
    ridge = 200.0  # strong enough that no probe decides its own fit, where the estimate is capped
    left_out = fit(x, residual, weights, 16, ridge, subspace=False).left_out.double().numpy()
    _, s_x, _, _ = closed_form(x, residual, weights, ridge)
    w = probes * (weights / weights.sum()).numpy()
    scaled, targets = x.numpy() / s_x, residual.numpy()
    for i in range(probes):
        rest = np.delete(np.arange(probes), i)
        share = w[rest] / w[rest].sum()
        mean_x, mean_r = share @ scaled[rest], share @ targets[rest]
        bar_x, bar_r = scaled[rest] - mean_x, targets[rest] - mean_r
        weighted = bar_x.T * w[rest]
        b = np.linalg.solve(weighted @ bar_x + ridge * np.eye(dim), weighted @ bar_r)
        wanted = targets[i] - mean_r - (scaled[i] - mean_x) @ b
        assert np.allclose(left_out[i], wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("probes, dim", [*SHAPES, (1, 5), (2, 5), (5, 1)])
@pytest.mark.parametrize("subspace", [True, False])
def test_without_a_ridge_the_fit_is_finite(probes, dim, subspace):
    x, residual, weights = problem(probes, dim)
    for features in (x, torch.ones_like(x), torch.zeros_like(x), x[:1].expand_as(x)):
        found = fit(features, residual, weights, 4, 0.0, subspace)
        assert torch.isfinite(found.predict(features)).all() and torch.isfinite(found.left_out).all()
    if probes > dim:
        found = fit(x, residual, weights, 4, 0.0, subspace=False)
        wanted = predicted(x, closed_form(x, residual, weights, 0.0))
        assert np.allclose(found.predict(x).numpy(), wanted, atol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_the_fit_survives_any_size_of_output(size):
    x, residual, weights = problem(20, 8)
    found = fit((size * x).float(), (size * residual).float(), weights, 4, 0.1)
    assert torch.isfinite(found.predict((size * x).float())).all()


def test_a_probe_whose_own_row_is_lost_is_left_out():
    x, residual, weights = problem(20, 8)
    clean = fit(
        torch.cat([x[:5], x[6:]]),
        torch.cat([residual[:5], residual[6:]]),
        torch.cat([weights[:5], weights[6:]]),
        4,
        0.0,
    )
    x, residual = x.clone(), residual.clone()
    x[5, 3], residual[5] = torch.inf, torch.nan
    found = fit(x, residual, weights, 4, 0.0)
    new = normal(10, 8, seed=4)
    assert torch.allclose(found.predict(new), clean.predict(new), atol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_a_probe_sees_beyond_the_kept_keys_reaches_every_row(value):
    x, residual, weights = problem(20, 8)
    residual[4, 2] = value
    found = fit(x, residual, weights, 4, 0.1).predict(normal(10, 8))
    assert found[:, 2].isnan().all()
    assert torch.isfinite(found[:, [0, 1, 3, 4, 5, 6, 7]]).all()


def test_probes_that_are_all_lost_correct_nothing():
    x, residual, weights = problem(6, 4)
    found = fit(torch.full_like(x, torch.nan), residual, weights, 4, 0.1)
    assert not found.predict(normal(5, 4)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_apply_corrects_rows_and_puts_probes_in_place(dtype):
    x, residual, weights = (t[None, None].expand(2, 3, *t.shape) for t in problem(10, 6))
    found = fit(x, residual, weights, 4, 0.1)
    out, exact = normal(2, 3, 40, 6), normal(2, 3, 10, 6, seed=8)
    rows = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i))[:10] for i in range(6)])
    probes = Probes(rows.view(2, 3, 10), weights, exact)
    wanted = out.double() + out.double() @ found.left.double() @ found.right.double()
    wanted = (wanted + found.bias.double()[:, :, None]).scatter(
        2, probes.rows[..., None].expand_as(exact), exact.double()
    )
    applied = apply_fit(out.clone(), found, probes, dtype, Backend())
    assert applied.dtype == dtype
    assert torch.allclose(applied.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
    placed = torch.take_along_dim(applied, probes.rows[..., None], 2)
    assert torch.equal(placed, exact.to(dtype))


def test_a_correction_never_leaves_the_range_of_fp16():
    """Dense attention cannot: its rows lie between the values. Inf in the sparse output stays visible."""
    out = torch.full((1, 1, 4, 2), 65504.0)
    out[0, 0, 1, 0] = torch.inf
    left, right, bias = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 1, 2), torch.tensor([[[900.0, -9e9]]])
    found = ResidualFit(left, right, bias, torch.zeros(1, 1, 1, 2))
    probes = Probes(torch.tensor([[[3]]]), torch.ones(1, 1, 1), torch.ones(1, 1, 1, 2))
    applied = apply_fit(out, found, probes, torch.float16, Backend())
    assert applied[0, 0, 0].tolist() == [65504.0, -65504.0]
    assert not torch.isfinite(applied[0, 0, 1, 0])
    assert applied[0, 0, 3].tolist() == [1.0, 1.0]


def test_error_estimate_is_the_weighted_mean_of_relative_errors():
    x, residual, weights = problem(12, 5)
    found = fit(x, residual, weights, 3, 5.0)
    probes = Probes(torch.arange(12).view(1, 1, 12), weights.float()[None, None], (x + residual).float()[None, None])
    relative = found.left_out.double().norm(dim=-1) / (x + residual).norm(dim=-1)
    wanted = float((relative * weights).sum() / weights.sum())
    assert float(estimate_error(found, probes)[0, 0]) == pytest.approx(wanted, rel=1e-4)

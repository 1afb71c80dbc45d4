"""Metrics, factors and coordinates against direct fp64 computations (the paper's section 4.1, appendix B)."""

import numpy as np
import pytest
import torch

from residua.method.grouping import partition as grouping
from residua.method.rules import CPU
from residua.ops.backend import Backend
from tests.support.oracle import normal

PLAIN = Backend()


def key_metric(q, rows, spacing="even"):
    return grouping.key_metric(q, rows, spacing, PLAIN)


def query_metric(centroids, sizes):
    return grouping.query_metric(centroids, sizes, PLAIN)


def metric_factor(metric, rank):
    return grouping.metric_factor(metric, rank, CPU, PLAIN)


def key_coordinates(k, factor):
    return PLAIN.project(k, factor, normalise=False)


def query_coordinates(q, factor):
    return PLAIN.project(q, factor, normalise=True)


def test_key_distance_identity():
    q, k = normal(1, 2, 50, 12), normal(1, 2, 9, 12, seed=1)
    metric = key_metric(q, 2048)
    for h in range(2):
        rows, keys = q[0, h].double().numpy(), k[0, h].double().numpy()
        for i in range(9):
            for j in range(9):
                difference = keys[i] - keys[j]
                left = difference @ metric[0, h].numpy() @ difference
                right = np.sum((rows @ difference) ** 2) / len(rows)
                assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def test_key_metric_samples_evenly_spaced_rows():
    q = normal(1, 1, 1000, 6)
    rows = q[0, 0].double().numpy()[[i * 1000 // 64 for i in range(64)]]
    assert np.allclose(key_metric(q, 64)[0, 0].numpy(), rows.T @ rows / 64, rtol=1e-12, atol=1e-13)
    everything = q[0, 0].double().numpy()
    assert np.allclose(key_metric(q, 5000)[0, 0].numpy(), everything.T @ everything / 1000, rtol=1e-12)


def test_golden_rows_do_not_all_lie_in_one_column():
    """Every 16th row of a picture 16 wide sees one column; the golden ratio sees them all."""
    column = torch.nn.functional.one_hot(torch.arange(4096) % 16, 16).float()[None, None]
    assert int((key_metric(column, 256).diagonal(dim1=-2, dim2=-1) > 0).sum()) == 1
    share = key_metric(column, 256, "golden").diagonal(dim1=-2, dim2=-1)[0, 0]
    assert (share > 0.5 / 16).all() and (share < 2 / 16).all()


def test_key_metric_leaves_out_rows_that_are_not_finite():
    q = normal(1, 1, 40, 5)
    q[0, 0, 3, 1], q[0, 0, 17, 4] = torch.nan, torch.inf
    rows = np.delete(q[0, 0].double().numpy(), [3, 17], axis=0)
    assert np.allclose(key_metric(q, 100)[0, 0].numpy(), rows.T @ rows / 38, rtol=1e-12)
    assert torch.equal(key_metric(torch.full_like(q, torch.nan), 100), torch.zeros(1, 1, 5, 5).double())


def test_query_metric_uses_non_empty_groups_with_equal_weight():
    centroids, sizes = normal(1, 1, 7, 5), torch.tensor([[[3, 0, 900, 1, 0, 2, 5]]])
    centroids[0, 0, 1] = 1e9  # empty: must not matter
    kept = centroids[0, 0, [0, 2, 3, 5, 6]].double().numpy()
    centred = kept - kept.mean(0)
    wanted = centred.T @ centred / (5 * 5)  # C+ times D
    assert np.allclose(query_metric(centroids, sizes)[0, 0].numpy(), wanted, rtol=1e-12, atol=1e-13)


def test_query_metric_of_no_group_is_zero():
    assert not query_metric(normal(1, 1, 3, 4), torch.zeros(1, 1, 3, dtype=torch.long)).any()


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_factor_is_leading_eigenvectors_with_unit_mean_eigenvalues(rank):
    rows = normal(30, 12).double().numpy() * np.linspace(0.1, 3, 12)
    metric = rows.T @ rows / 30
    values, vectors = np.linalg.eigh(metric)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    weights = values / values.mean()
    factor = metric_factor(torch.from_numpy(metric)[None, None], rank)[0, 0].double().numpy()
    assert factor.shape == (12, rank)
    assert np.allclose((factor**2).sum(0), weights, rtol=1e-5) and weights.mean() == pytest.approx(1)
    for column in range(rank):  # eigenvectors have no sign
        wanted = vectors[:, column] * np.sqrt(weights[column])
        sign = np.sign(wanted @ factor[:, column])
        assert np.allclose(sign * factor[:, column], wanted, atol=1e-6)


def test_factor_does_not_depend_on_the_metrics_size():
    rows = normal(40, 8, dtype=torch.float64)
    metric = rows.mT @ rows
    first = metric_factor(metric, 4)
    for size in (1e-280, 1e-30, 1e30, 1e280):
        scaled = metric_factor(metric * size, 4)
        assert torch.allclose(scaled @ scaled.mT, first @ first.mT, atol=1e-6)


def test_factor_of_a_low_rank_or_zero_metric_is_finite():
    row = normal(1, 8, dtype=torch.float64)
    factor = metric_factor(row.mT @ row, 5)
    assert torch.isfinite(factor).all()
    assert factor.square().sum(0)[0] == pytest.approx(5, rel=1e-6)  # the only direction has all the weight
    assert not metric_factor(torch.zeros(8, 8), 5).any()


def test_distance_in_coordinates_is_the_normalised_metric_distance():
    q, k = normal(1, 1, 60, 10), normal(1, 1, 6, 10, seed=2)
    metric = key_metric(q, 100)
    phi = key_coordinates(k, metric_factor(metric, 10))[0, 0].double()
    mean_eigenvalue = float(metric[0, 0].trace()) / 10  # full rank: normalised by the mean of all
    for i in range(6):
        for j in range(6):
            difference = (k[0, 0, i] - k[0, 0, j]).double()
            wanted = float(difference @ metric[0, 0] @ difference) / mean_eigenvalue
            assert float((phi[i] - phi[j]).square().sum()) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_coordinates_per_head(dtype):
    x, factor = normal(2, 3, 20, 8, dtype=dtype), normal(2, 3, 8, 4, seed=1)
    phi, unit = key_coordinates(x, factor), query_coordinates(x, factor)
    assert phi.dtype == unit.dtype == torch.float32
    for b in range(2):
        for h in range(3):
            for i in range(20):
                row = factor[b, h].double().numpy().T @ x[b, h, i].double().numpy()
                rms = np.sqrt(np.sum(row**2) / 4)
                assert np.allclose(phi[b, h, i].numpy(), row, rtol=1e-4, atol=1e-5)
                assert np.allclose(unit[b, h, i].numpy(), row / max(rms, 1e-6), rtol=1e-4, atol=1e-5)


def test_rms_has_a_floor_of_one_millionth():
    factor = torch.eye(4)[None, None]
    rows = torch.tensor([[1e-9, 0, 0, 0], [0, 0, 0, 0], [4e-6, 0, 0, 0]])[None, None]
    unit = query_coordinates(rows, factor)[0, 0]
    assert unit[0, 0] == pytest.approx(1e-3, rel=1e-5)  # rms 5e-10 is below the floor: divided by 1e-6
    assert not unit[1].any()
    assert unit[2, 0] == pytest.approx(2.0, rel=1e-5)  # rms 2e-6 is above it


def test_a_longer_query_has_the_same_coordinates():
    q, factor = normal(1, 1, 10, 6), normal(1, 1, 6, 3, seed=4)
    assert torch.allclose(query_coordinates(q, factor), query_coordinates(100 * q, factor), rtol=1e-5)

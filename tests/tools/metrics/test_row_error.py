"""Error metrics against numpy."""

import numpy as np
import pytest
import torch

from residua.tools.metrics.row_error import relative_row_error, row_errors
from tests.support.oracle import normal


def test_rows_mean_and_percentile_against_numpy():
    out, dense = normal(2, 3, 70, 5), normal(2, 3, 70, 5, seed=1)
    a, b = out.double().numpy(), dense.double().numpy()
    errors = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
    assert np.allclose(relative_row_error(out, dense).numpy(), errors, rtol=1e-5)
    mean, p99 = row_errors(out, dense)
    assert mean == pytest.approx(errors.mean(), rel=1e-5)
    assert p99 == pytest.approx(np.quantile(errors, 0.99, method="inverted_cdf"), rel=1e-5)


def test_probe_rows_can_be_left_out():
    dense = normal(1, 2, 10, 4)
    out = dense.clone()
    out[0, 0, 3] += 100
    out[0, 1, 7] += 100
    assert row_errors(out, dense)[0] > 1
    assert row_errors(out, dense, torch.tensor([[[3], [7]]])) == (0.0, 0.0)


def test_low_precision_outputs_are_compared_in_fp32():
    dense = normal(1, 1, 50, 8)
    mean, _ = row_errors(dense.bfloat16(), dense)
    assert 0 < mean < 0.004


def test_a_zero_row_does_not_divide_by_zero():
    dense = torch.zeros(1, 1, 2, 3)
    assert relative_row_error(dense, dense).tolist() == [[[0.0, 0.0]]]

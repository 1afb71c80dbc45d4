"""Leading eigenspaces without an eigensolver."""

import pytest
import torch

from residua.method.grouping.partition import metric_factor
from residua.method.rules import CPU
from residua.ops.backend import Backend
from residua.ops.subspace import leading_basis, leading_factor


def matrices(decay: float, size: int = 96, count: int = 3) -> torch.Tensor:
    """Symmetric matrices whose eigenvalues fall from 1 by the factor `decay` each."""
    generator = torch.Generator().manual_seed(0)
    vectors, _ = torch.linalg.qr(torch.randn(count, size, size, generator=generator, dtype=torch.double))
    values = decay ** torch.arange(size, dtype=torch.double)
    return vectors @ (values[:, None] * vectors.mT)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.97])
@pytest.mark.parametrize("rank", [8, 16, 48, 96])
def test_the_space_holds_what_the_leading_eigenvectors_hold(decay, rank):
    matrix = matrices(decay)
    basis = leading_basis(matrix, rank)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(rank, dtype=torch.double).expand(3, rank, rank))
    held = (basis.mT @ matrix @ basis).diagonal(dim1=-2, dim2=-1).sum(-1)
    best = torch.linalg.eigvalsh(matrix)[..., -rank:].sum(-1)
    assert ((held / best) > 0.97).all()
    assert torch.equal(basis, leading_basis(matrix, rank))


def test_distances_and_lengths_are_those_of_the_eigenvectors():
    metric = matrices(0.8)
    x = torch.randn(3, 40, 96, generator=torch.Generator().manual_seed(1))
    ours, theirs = x @ leading_factor(metric, 48), x @ metric_factor(metric, 48, CPU, Backend())
    torch.testing.assert_close(*(torch.cdist(y[:, :20], y[:, 20:]) for y in (ours, theirs)), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(ours.norm(dim=-1), theirs.norm(dim=-1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_a_single_direction_and_any_size(scale):
    metric = torch.zeros(1, 64, 64, dtype=torch.double)
    metric[0, 3, 3] = scale
    factor = leading_factor(metric, 16)
    torch.testing.assert_close(factor @ factor.mT, 16 * (metric / scale).float(), atol=1e-4, rtol=1e-4)


def test_nothing_stays_nothing():
    factor = leading_factor(torch.zeros(2, 8, 8, dtype=torch.double), 4)
    assert torch.equal(factor, torch.zeros(2, 8, 4))

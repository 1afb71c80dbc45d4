"""The native small stages (eigenvectors, moments, sorting, probe rows, budget) against plain torch."""

import pytest
import torch
from torch import Tensor

from residua.errors import RouteError
from residua.ops.backend import Backend
from residua.ops.native import NativeBackend
from residua.types import Partition
from tests.support.making import spend
from tests.support.native_library import needs_library, on_every_isa
from tests.support.poison import poisoned_memory

BASE = Backend()

pytestmark = [needs_library, on_every_isa]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def labels_of(seed: int, *shape: int, groups: int, loose: float = 0.1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    labels = (torch.rand(shape, generator=g).square() * (groups + 1)).long()  # uneven
    labels = torch.where((labels == 2) | (labels == groups), 0, labels)  # two groups are empty
    return torch.where(torch.rand(shape, generator=g) < loose, -1, labels)


def check_eigen(matrix: Tensor, isa: str, bound: float = 2e-14) -> tuple[Tensor, Tensor]:
    values, vectors = NativeBackend(isa)._eigh(matrix)
    size = matrix.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    n = matrix.shape[-1]
    assert values.shape == matrix.shape[:-1] and vectors.shape == matrix.shape
    assert bool((values.diff(dim=-1) >= 0).all())
    eye = torch.eye(n, dtype=torch.float64)
    assert float((vectors.mT @ vectors - eye).abs().max()) <= bound * n**0.5
    assert float(((matrix @ vectors - vectors * values[..., None, :]) / size).abs().max()) <= bound * n**0.5
    wanted = torch.linalg.eigvalsh(matrix / size) * size[..., 0]
    assert float(((values - wanted) / size[..., 0]).abs().max()) <= bound * n**0.5
    return values, vectors


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 33, 64, 100, 128, 256])
def test_eigenvectors(isa, n):
    x = normal(n, 2, 1, n, n)
    check_eigen(x + x.mT, isa)
    spread = x * torch.logspace(0, -9, n, dtype=torch.float64)
    check_eigen(spread.mT @ spread, isa)


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1e150, 1e300])
def test_eigenvectors_do_not_depend_on_the_size_of_the_matrix(isa, size):
    x = normal(0, 20, 20)
    check_eigen((x + x.mT) / 10 * size, isa)


@pytest.mark.parametrize("power", [20, 70, 100, 140, 160])
def test_eigenvectors_beside_entries_that_nearly_vanish(isa, power):
    """Reflections of tiny rows had infinite factors: NaN among the values, and results never set."""
    tiny = 10.0**-power
    matrix = torch.diag(torch.tensor([1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    noise = normal(power, 7, 7) * tiny
    matrix = matrix + noise + noise.mT
    first = check_eigen(matrix, isa)
    rank_one = normal(1, 1, 9).mT @ normal(1, 1, 9)
    rank_one[3:] *= tiny
    rank_one[:, 3:] *= tiny
    check_eigen(rank_one, isa)
    for byte in (0xFF, 0x41):
        with poisoned_memory(byte):
            again = check_eigen(matrix, isa)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("rows, inner, columns", [(1, 17, 3), (1, 96, 64), (7, 33, 70), (64, 128, 300), (5, 1, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_matmul(isa, rows, inner, columns, turned):
    x = normal(0, 3, 2, rows, inner, dtype=torch.float32)
    y = normal(1, 3, 2, inner, columns, dtype=torch.float32)
    y = y.mT.contiguous().mT if turned else y
    backend = NativeBackend(isa)
    out = backend.matmul(x, y)
    wanted = x.double() @ y.double()
    assert float((out - wanted).abs().max()) <= 1e-6 * inner**0.5 * float(wanted.abs().max())
    alone = backend.matmul(x[1:2], y[1:2])
    assert torch.equal(out[1:2], alone)  # whatever stands beside it
    with poisoned_memory():
        assert torch.equal(out, backend.matmul(x, y))


@pytest.mark.parametrize("dim, rank", [(8, 8), (17, 1), (64, 16), (96, 33)])
def test_shared_directions(isa, dim, rank):
    x, y = (normal(0, 2, 1, 40, dim), normal(1, 2, 1, 50, dim) * torch.logspace(0, -2, dim, dtype=torch.float64))
    spread, covariance = x.mT @ x / 40, y.mT @ y / 50
    backend = NativeBackend(isa)
    found, wanted = (it(spread, covariance, rank, 0.2) for it in (backend.shared_directions, BASE.shared_directions))
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
    alone = backend.shared_directions(spread[1:], covariance[1:], rank, 0.2)
    assert all(torch.equal(a[1:], b) for a, b in zip(found, alone, strict=True))
    nothing = backend.shared_directions(0 * spread, 0 * covariance, rank, 0.2)
    assert all(t.isfinite().all() for t in nothing)


def test_eigenvectors_of_special_matrices(isa):
    n = 40
    row = normal(1, 1, n)
    ladder = torch.diag(torch.full((n - 1,), 1.0, dtype=torch.float64), 1)
    blocks = torch.block_diag(normal(2, 20, 20), torch.zeros(20, 20, dtype=torch.float64))
    for matrix in (
        torch.zeros(n, n, dtype=torch.float64),
        torch.eye(n, dtype=torch.float64) * 3,
        torch.diag(normal(3, n)),
        row.mT @ row,  # one eigenvalue is not zero
        torch.ones(n, n, dtype=torch.float64),
        ladder + ladder.mT,
        blocks + blocks.mT,
        torch.diag(torch.logspace(0, -300, n, dtype=torch.float64)) + 1e-200 * (ladder + ladder.mT),
    ):
        check_eigen(matrix, isa)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_eigenvectors_of_what_is_not_finite_end_and_stay_with_their_matrix(isa, bad):
    x = normal(0, 3, 50, 50)
    matrix = x + x.mT
    matrix[1, 4, 7] = bad
    values, vectors = NativeBackend(isa)._eigh(matrix)
    assert bool(values[1].isnan().all()) and bool(vectors[1].isnan().all())
    check_eigen(matrix[[0, 2]], isa)


def test_eigenvectors_are_the_same_on_any_number_of_threads(isa):
    x = normal(0, 5, 64, 64)
    matrix, threads = x + x.mT, torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(NativeBackend(isa)._eigh(matrix))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rows,dim", [(1, 8), (63, 40), (200, 128), (130, 250)])
def test_second_moment(isa, dtype, centred, rows, dim):
    x = normal(0, 2, rows, 3, dim, dtype=dtype).transpose(1, 2) + 1
    counted = torch.rand(2, 3, rows, generator=torch.Generator().manual_seed(1)) < 0.7
    x[0, 1, rows // 2, dim - 1], x[1, 2, rows // 3, 0] = torch.nan, torch.inf
    counted[1, 0] = False
    for mask in (counted, None):
        found = NativeBackend(isa).second_moment(x, mask, centred)
        assert found.dtype == torch.float64 and torch.equal(found, found.mT)
        torch.testing.assert_close(found, BASE.second_moment(x, mask, centred), rtol=1e-12, atol=1e-13)
    assert not NativeBackend(isa).second_moment(x, counted, centred)[1, 0].any()


@pytest.mark.parametrize("tokens,groups", [(1, 1), (70, 9), (5000, 300)])
def test_sort_groups(isa, tokens, groups):
    labels = labels_of(0, 2, 3, tokens, groups=groups)
    found, wanted = NativeBackend(isa).sort_groups(labels, groups), Partition.from_labels(labels, groups)
    assert torch.equal(found.order, wanted.order) and torch.equal(found.offsets, wanted.offsets)
    assert torch.equal(found.labels, labels)


def test_labels_outside_are_refused(isa):
    labels = torch.full((1, 1, 5), 3)
    with pytest.raises(RouteError):
        NativeBackend(isa).sort_groups(labels, 3)
    with pytest.raises(RouteError):
        NativeBackend(isa).central_rows(torch.zeros(1, 1, 5, 2), labels, 3, 2)


@pytest.mark.parametrize("count", [1, 5, 64, 300, 400])
@pytest.mark.parametrize("rank", [3, 16, 70])
def test_central_rows(isa, count, rank):
    x, labels = normal(0, 2, 2, 400, rank, dtype=torch.float32), labels_of(1, 2, 2, 400, groups=30)
    found = NativeBackend(isa).central_rows(x, labels, 30, count)
    wanted = BASE.central_rows(x, labels, 30, count)
    grouped = labels.gather(-1, wanted) >= 0  # what fills up behind them has no order
    assert torch.equal(torch.where(grouped, found, -1), torch.where(grouped, wanted, -1))
    assert torch.equal(found.sort(-1).values, wanted.sort(-1).values) or count < 400
    assert all(len(set(rows.tolist())) == count for rows in found.view(-1, count))


def test_central_rows_with_ties_and_nan(isa):
    x = torch.tensor([-1.0, 1, 1, -1, 2, -2, 0, 0]).view(1, 1, 8, 1)
    labels = torch.zeros(1, 1, 8, dtype=torch.long)
    assert NativeBackend(isa).central_rows(x, labels, 1, 8)[0, 0].tolist() == [6, 7, 0, 1, 2, 3, 4, 5]
    x = torch.tensor([torch.nan, 1, 2, 3, 5, torch.inf]).view(1, 1, 6, 1)
    labels = torch.tensor([0, 0, 0, 1, 1, 2]).view(1, 1, 6)
    found = NativeBackend(isa).central_rows(x, labels, 3, 6)
    assert found[0, 0].tolist() == [0, 3, 5, 1, 4, 2]
    assert torch.equal(found, BASE.central_rows(x, labels, 3, 6))


@pytest.mark.parametrize("cells", [(1, 1), (5, 7), (40, 90)])
@pytest.mark.parametrize("budget", [-5, 0, 300, 20_000, 10**9])
def test_spend(isa, cells, budget):
    g = torch.Generator().manual_seed(budget + 10)
    queries, keys = (torch.randint(0, 30, (2, 3, n), generator=g) for n in cells)
    share = normal(1, 2, 3, *cells, dtype=torch.float32).mul(4).round() / 4  # ties
    share[0, 0, :, cells[1] // 2] = torch.nan
    share[0, 1, cells[0] // 2] = -torch.inf
    share[0, 2] *= -0.0
    left = torch.full((2, 1), budget).expand(2, 3)
    found = spend(NativeBackend(isa), share, queries, keys, left)
    assert torch.equal(found, spend(BASE, share, queries, keys, left))


@pytest.mark.parametrize("probes,dim", [(1, 8), (20, 40), (40, 40), (64, 128), (90, 33)])
@pytest.mark.parametrize("ridge", [0.0, 0.1, 10.0])
@pytest.mark.parametrize("subspace", [True, False])
def test_fit_residual(isa, probes, dim, ridge, subspace):
    x = normal(0, 2, 2, probes, dim, dtype=torch.float32) + 1
    residual = normal(1, 2, 2, probes, dim, dtype=torch.float32) * torch.logspace(0, -2, dim)
    weights = normal(2, 2, 2, probes, dtype=torch.float32).square() + 0.1
    rank = min(7, probes, dim) if subspace else dim
    found = NativeBackend(isa).fit_residual(x, residual, weights, 7, ridge, subspace)
    wanted = BASE.fit_residual(x, residual, weights, 7, ridge, subspace)
    for name in ("left", "right", "bias", "left_out"):
        assert getattr(found, name).shape == getattr(wanted, name).shape
    assert found.left.shape == (2, 2, dim, rank)
    # eigenvectors have no sign, so the factors are compared by their product
    close = {"rtol": 1e-4, "atol": 1e-5} if ridge else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(found.left @ found.right, wanted.left @ wanted.right, **close)
    torch.testing.assert_close(found.bias, wanted.bias, **close)
    torch.testing.assert_close(found.left_out, wanted.left_out, **close)


def test_fit_residual_with_probes_that_are_not_finite(isa):
    x, residual = (normal(seed, 1, 1, 30, 16, dtype=torch.float32) for seed in (0, 1))
    weights = torch.ones(1, 1, 30)
    x[0, 0, 4, 3], residual[0, 0, 4] = torch.nan, torch.nan  # lost, so left out
    residual[0, 0, 9, 5] = torch.inf  # seen among the skipped keys, so passed on
    found = NativeBackend(isa).fit_residual(x, residual, weights, 5, 0.1, True)
    wanted = BASE.fit_residual(x, residual, weights, 5, 0.1, True)
    assert bool(found.bias[0, 0, 5].isnan()) and int(found.bias.isnan().sum()) == 1
    torch.testing.assert_close(found.left @ found.right, wanted.left @ wanted.right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.bias, wanted.bias, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(found.left_out, wanted.left_out, rtol=1e-4, atol=1e-5)


def test_fit_residual_of_nothing(isa):
    nothing = torch.zeros(1, 1, 20, 8)
    for weights in (torch.ones(1, 1, 20), torch.zeros(1, 1, 20)):
        fit = NativeBackend(isa).fit_residual(nothing, nothing, weights, 4, 0.1, True)
        assert not any(t.any() for t in (fit.left, fit.right, fit.bias, fit.left_out))


def test_only_finite(isa):
    x = normal(0, 2, 400, 48, dtype=torch.float32)
    assert NativeBackend(isa)._only_finite(x) is x
    for place, bad in ((0, torch.nan), (-1, torch.inf), (19_000, -torch.inf)):
        broken = x.clone()
        broken.view(-1)[place] = bad
        wanted = torch.where(broken.isfinite(), broken, 0.0)
        assert torch.equal(NativeBackend(isa)._only_finite(broken), wanted)

"""The native stages around attention, on every instruction set, against plain torch and against fp64."""

import pytest
import torch
from torch import Tensor

from residua.errors import RouteError
from residua.ops.backend import Backend
from residua.ops.native import NativeBackend
from residua.types import Partition
from tests.support.native_library import needs_library, on_every_isa

BASE = Backend()

pytestmark = [needs_library, on_every_isa]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = 0.2


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def partition(seed: int, batch: int, heads: int, tokens: int, groups: int, loose: float = 0.1) -> Partition:
    g = torch.Generator().manual_seed(seed)
    labels = (torch.rand(batch, heads, tokens, generator=g).square() * groups).long()
    labels[torch.rand(labels.shape, generator=g) < loose] = -1
    return Partition.from_labels(labels, groups)


@pytest.mark.parametrize("tokens,groups,rank", [(1, 1, 1), (7, 20, 3), (97, 16, 16), (2100, 65, 48), (500, 130, 7)])
def test_kmeans_step_equals_plain_torch(isa, tokens, groups, rank):
    x, centres = rows(0, 3, tokens, rank), rows(1, 3, groups, rank)
    labels, means, sizes = NativeBackend(isa).lloyd(x, centres, 1, None)
    wanted_labels, wanted_means, wanted_sizes = BASE._lloyd_step(x, centres, None)
    assert torch.equal(labels, wanted_labels) and torch.equal(sizes, wanted_sizes)
    torch.testing.assert_close(means, wanted_means)


def test_kmeans_step_with_padding_keeps_empty_centres(isa):
    x, centres = rows(0, 2, 300, 16), rows(1, 2, 40, 16)
    centres[:, 7] = 1e3  # nobody's nearest
    valid = torch.rand(2, 300, generator=torch.Generator().manual_seed(2)) < 0.7
    labels, means, sizes = NativeBackend(isa).lloyd(x, centres, 1, valid)
    assert torch.equal(labels >= 0, valid)
    assert int(sizes.sum()) == int(valid.sum()) and bool((sizes[:, 7] == 0).all())
    assert torch.equal(means[:, 7], centres[:, 7])
    wanted = BASE._lloyd_step(x, centres, valid)
    assert torch.equal(labels, wanted[0])
    torch.testing.assert_close(means, wanted[1])


def test_kmeans_step_breaks_ties_by_the_lowest_index(isa):
    centres = rows(0, 1, 1, 8).expand(1, 150, 8)
    labels, _, sizes = NativeBackend(isa).lloyd(rows(1, 1, 90, 8), centres, 1, None)
    assert bool((labels == 0).all()) and int(sizes[0, 0]) == 90
    twins = torch.cat([rows(2, 1, 70, 8), rows(2, 1, 70, 8)], 1)
    labels, _, _ = NativeBackend(isa).lloyd(rows(1, 1, 90, 8), twins, 1, None)
    assert bool((labels < 70).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_kmeans_labels_stay_in_range(isa, bad):
    x, centres = rows(0, 1, 100, 16), rows(1, 1, 20, 16)
    x[0, 5, 3] = bad
    centres[0, 11, 2] = bad
    labels, _, sizes = NativeBackend(isa).lloyd(x, centres, 1, None)
    assert int(labels.min()) >= 0 and int(labels.max()) < 20 and int(sizes.sum()) == 100


def test_stages_do_not_depend_on_the_number_of_threads(isa, threads):
    backend = NativeBackend(isa)
    x, k, v = rows(0, 2, 3000, 24), rows(1, 1, 2, 5000, 40), rows(2, 1, 2, 5000, 40)
    groups = partition(3, 1, 2, 5000, 37)
    probe = rows(4, 1, 4, 70, 40)

    def run():
        yield from backend.lloyd(x, x[:, :50], 1, None)
        yield backend.group_means(k, groups)
        yield backend.cell_mass(probe, k, groups, SCALE)
        yield backend.attend_rows(probe, k, v, None, SCALE)
        yield backend.project(k, rows(5, 1, 2, 40, 24), True)

    results = []
    for count in (1, 2, 3, 1):
        threads(count)
        results.append(list(run()))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 33, 128])
def test_group_means(isa, dtype, dim):
    x = rows(0, 2, 3, 900, dim, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    groups = partition(1, 2, 3, 900, 80)
    means = NativeBackend(isa).group_means(x, groups)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means, BASE.group_means(x, groups), rtol=1e-5, atol=1e-6)
    assert bool((means[groups.sizes == 0] == 0).all())


def test_mean_of_one_huge_group_is_accurate(isa):
    x = rows(0, 1, 1, 60_000, 8) + 100
    groups = Partition.from_labels(torch.zeros(1, 1, 60_000, dtype=torch.long), 1)
    means = NativeBackend(isa).group_means(x, groups)
    torch.testing.assert_close(means[0, 0, 0].double(), x[0, 0].double().mean(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 40, 128])
def test_cell_mass(isa, dtype, dim):
    k, anchors = rows(0, 2, 2, 700, dim, dtype=dtype), rows(1, 2, 6, 23, dim)
    groups = partition(2, 2, 2, 700, 19)
    mass = NativeBackend(isa).cell_mass(anchors, k, groups, SCALE)
    wanted = BASE.cell_mass(anchors, k, groups, SCALE)
    assert mass.shape == (2, 6, 23, 19)
    torch.testing.assert_close(mass, wanted, rtol=1e-5, atol=1e-5)


def test_cell_mass_of_empty_loud_and_bad_groups(isa):
    k, anchors = rows(0, 1, 1, 60, 16), rows(1, 1, 1, 9, 16)
    labels = torch.arange(60).remainder(4)[None, None]
    k[0, 0, labels[0, 0] == 1] *= 1e4
    k[0, 0, 2, 0] = torch.nan
    mass = NativeBackend(isa).cell_mass(anchors, k, Partition.from_labels(labels, 5), SCALE)
    assert bool(mass[..., 2].isnan().all())
    assert bool((mass[..., 4] == -torch.inf).all())
    assert bool(mass[..., [0, 1, 3]].isfinite().all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_gather_rows(isa, dtype):
    x = rows(0, 2, 3, 5, 400, dtype=dtype).mT[..., :400, :].transpose(0, 1)  # no stride is what it seems
    order = partition(1, 3, 2, 400, 9).order[..., ::3]
    assert torch.equal(NativeBackend(isa).gather_rows(x, order), BASE.gather_rows(x, order))


def test_gather_rows_refuses_indices_outside(isa):
    with pytest.raises(RouteError):
        NativeBackend(isa).gather_rows(rows(0, 1, 1, 10, 8), torch.full((1, 1, 3), 10))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count,keys,dim", [(1, 1, 8), (64, 5000, 64), (300, 2500, 24)])
def test_attend_rows(isa, dtype, count, keys, dim):
    probe = rows(0, 1, 4, count, dim, dtype=dtype)
    k, v = rows(1, 1, 2, keys, dim, dtype=dtype), rows(2, 1, 2, keys, dim + 5, dtype=dtype)
    out = NativeBackend(isa).attend_rows(probe, k, v, None, SCALE)
    wanted = BASE.attend_rows(probe.double(), k.double(), v.double(), None, SCALE)
    # products of bfloat16 pairs round the weights, as torch's own low-precision attention does; probes do not
    pairs = isa == "avx512bf16" and dtype == torch.bfloat16 and count > 256
    bound = 4e-3 if pairs else 3e-6
    assert out.dtype == torch.float32 and out.shape == wanted.shape
    assert (out - wanted).norm() <= bound * wanted.norm()


def test_attend_rows_with_padding(isa):
    probe, k, v = rows(0, 2, 2, 20, 16), rows(1, 2, 2, 4200, 16), rows(2, 2, 2, 4200, 16)
    mask = torch.rand(2, 4200, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, :2500] = False  # a whole chunk without a key
    k[0, :, 17], v[0, :, 18] = torch.nan, torch.nan
    out = NativeBackend(isa).attend_rows(probe, k, v, mask, SCALE)
    torch.testing.assert_close(out, BASE.attend_rows(probe, k, v, mask, SCALE), rtol=1e-4, atol=1e-5)
    nothing = NativeBackend(isa).attend_rows(probe, k, v, torch.zeros_like(mask), SCALE)
    assert bool((nothing == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("tokens,dim,rank", [(1, 8, 1), (1000, 128, 48), (301, 40, 70)])
def test_project(isa, dtype, normalise, tokens, dim, rank):
    x, factor = rows(0, 1, tokens, 2, dim, dtype=dtype).transpose(1, 2), rows(1, 1, 2, dim, rank)
    out = NativeBackend(isa).project(x, factor, normalise)
    torch.testing.assert_close(out, BASE.project(x, factor, normalise), rtol=1e-4, atol=1e-4)


def test_project_of_zero_rows_is_zero(isa):
    out = NativeBackend(isa).project(torch.zeros(1, 1, 9, 16), rows(1, 1, 1, 16, 5), True)
    assert bool((out == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens,dim,rank", [(1, 8, 1), (1000, 128, 16), (301, 40, 70)])
def test_add_affine(isa, dtype, tokens, dim, rank):
    out, bias = rows(0, 2, 2, tokens, dim), rows(3, 2, 2, dim)
    left, right = rows(1, 2, 2, dim, rank) / dim, rows(2, 2, 2, rank, dim)
    wanted = BASE.add_affine(out.clone(), left, right, bias, torch.float32)
    found = NativeBackend(isa).add_affine(out.clone(), left, right, bias, dtype)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), wanted, rtol=2 * eps, atol=max(1e-5, eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_to_the_output_dtype_is_that_of_torch(isa, dtype):
    special = torch.tensor([0.0, 1e-8, -3e-8, 5.96e-8, 6.1e-5, 65504, 65519.9, 65520, -1e9, 1e38, 3.4e38, 1 + 2**-9])
    x = torch.cat([special, rows(0, 3012) * torch.logspace(-10, 6, 3012)]).view(1, 1, 189, 16)
    nothing, bias = torch.zeros(1, 1, 16, 1), torch.zeros(1, 1, 16)
    found = NativeBackend(isa).add_affine(x.clone(), nothing, nothing.mT, bias, dtype)
    assert torch.equal(found, x.to(dtype))

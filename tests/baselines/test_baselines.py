"""The methods on one task: dense when nothing is skipped, inside the budget when something is, what each promises."""

from dataclasses import replace

import pytest
import torch

from residua import Config
from residua.baselines import METHODS, Method, Outcome, Task, groups, oracle, pisa, selection, svg_ear, svoo, xattention
from residua.baselines import task as tasks
from residua.errors import InputError
from residua.method.grouping.partition import kmeans
from residua.tools.metrics.row_error import relative_row_error, row_errors
from residua.tools.studies.baselines import chosen_methods
from residua.tools.synthetic import VideoLike, video_like
from residua.types import Partition, Route

GRID = (4, 8, 12)
DENSITIES = (0.12, 0.22, 0.5)
CELL_BASED = [name for name in METHODS if name not in ("dense", "paper", "authors", "tail", "anchored")]


def task_at(density: float, heads: int = 2, backend: str = "torch") -> Task:
    q, k, v = video_like(VideoLike(grid=GRID, heads=heads, head_dim=32, seed=3))
    config = Config(density=density, query_groups=12, kv_groups=24, backend=backend)
    return Task(q, k, v, config, 32**-0.5, GRID)


def dense_reference(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    return tasks.attend_all(task.backend, task.q, task.k, task.v, task.scale)


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    return dense_reference(task_at(1.0))[0]


def singletons(x: torch.Tensor) -> Partition:
    return groups.from_places(x, torch.arange(x.shape[2]))


def skipped_mass(task: Task, route: Route) -> float:
    mass = oracle.true_mass(task, route.query, route.kv)
    return float(mass[~route.cells].sum() / mass.sum())


def test_the_reference_is_dense_attention(truth):
    found = METHODS["dense"].run(task_at(0.22))
    torch.testing.assert_close(found.out, truth, atol=2e-5, rtol=1e-4)
    assert found.executed == task_at(0.22).possible


@pytest.mark.parametrize("name", list(METHODS))
def test_nothing_skipped_is_dense(name, truth):
    task = task_at(1.0)
    found = METHODS[name].run(task)
    assert found.executed == task.possible
    torch.testing.assert_close(found.out, truth, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", CELL_BASED)
def test_pairs_are_those_of_the_mask_and_within_the_target(name, density):
    task = task_at(density)
    found = METHODS[name].run(task)
    route = found.route
    counted = 0
    for h in range(2):
        mask = route.cells[0, h][route.query.labels[0, h]][:, route.kv.labels[0, h]]  # [Nq, Nk]
        counted += int(mask.sum())
        assert int(mask.sum()) <= density * task.rows * task.keys
        assert mask.any(1).all()
    assert found.executed == counted == found.pairs["routed"]
    assert counted >= 0.9 * density * task.possible  # a budget that is left unspent would not be a match
    assert found.out.shape == task.v.shape and torch.isfinite(found.out).all()


@pytest.mark.parametrize("name", ["window", "sta", "sparge", "xattention", "svg2", "svoo", "hard-drop"])
def test_hard_drop_attends_to_the_mask_alone(name):
    task = task_at(0.22, heads=1)
    found = METHODS[name].run(task)
    route = found.route
    mask = route.cells[0, 0][route.query.labels[0, 0]][:, route.kv.labels[0, 0]]
    logits = (task.scale * task.q[0, 0] @ task.k[0, 0].mT).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(found.out[0, 0], logits.softmax(-1) @ task.v[0, 0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.lse[0, 0], logits.logsumexp(-1), atol=2e-5, rtol=1e-4)


def test_sparsepr_pays_for_its_probes():
    task = task_at(0.22)
    found = METHODS["paper"].run(task)
    rows = found.probe_rows
    assert found.pairs["probe"] == rows.numel() * task.keys
    assert found.executed <= 0.22 * task.possible
    dense = dense_reference(task)[0]
    error = relative_row_error(found.out, dense).gather(-1, rows)
    assert error.max() < 1e-4  # they are the rows that were computed exactly
    assert all(METHODS[name].run(task_at(1.0)).probe_rows is None for name in ("paper", "anchored"))


@pytest.mark.parametrize("density", [0.22, 0.5])
def test_anchored_pays_for_everything_but_grouping(density):
    q, k, v = video_like(VideoLike(grid=(4, 16, 16), heads=1, head_dim=32, seed=3))
    task = Task(q, k, v, Config(density=density, query_groups=12, kv_groups=24, backend="torch"), 32**-0.5)
    found = METHODS["anchored"].run(task)
    beside = found.products["prediction"] + found.products["compensation"]
    assert beside > 0 and found.pairs["probe"] > 0
    assert found.executed + beside <= density * task.possible + 1  # a half of rounding each
    rows = found.probe_rows
    assert found.pairs["probe"] == rows.numel() * task.keys
    error = relative_row_error(found.out, dense_reference(task)[0]).gather(-1, rows)
    assert error.max() < 1e-4


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", CELL_BASED)
def test_no_route_skips_less_than_the_oracle_on_the_same_cells(name, density):
    task = task_at(density)
    route = METHODS[name].run(task).route
    mass = oracle.true_mass(task, route.query, route.kv) / route.query.sizes.clamp(min=1)[..., None]
    best = selection.best_per_pair(task, mass.log(), route.query, route.kv)
    sizes = route.kv.sizes[route.kv.sizes > 0]
    # with cells of unequal sizes the best choice is a knapsack, which greed misses by less than one cell
    slack = 0.0 if sizes.unique().numel() == 1 else 0.01
    assert skipped_mass(task, best) <= skipped_mass(task, route) + slack + 1e-9


def test_true_mass_is_that_of_the_whole_map(monkeypatch):
    task = task_at(0.22, heads=1)
    monkeypatch.setattr(tasks, "CHUNK", 5 * task.keys)
    query, kv = groups.blocks_of(task, task.q, 12), groups.blocks_of(task, task.k, 24)
    weights = (task.scale * task.q[0, 0] @ task.k[0, 0].mT).softmax(-1).double()
    rows = torch.nn.functional.one_hot(query.labels[0, 0]).double()
    columns = torch.nn.functional.one_hot(kv.labels[0, 0]).double()
    torch.testing.assert_close(oracle.true_mass(task, query, kv)[0, 0], rows.mT @ weights @ columns)


def some_cells(task: Task, query: Partition, kv: Partition, share: float = 0.2) -> Route:
    generator = torch.Generator().manual_seed(0)
    cells = torch.rand(*task.q.shape[:2], query.groups, kv.groups, generator=generator) < share
    cells[..., 0] = True
    return Route(query, kv, cells)


def test_compensation_of_single_keys_is_exact(truth, monkeypatch):
    task = task_at(0.22)
    monkeypatch.setattr(tasks, "CHUNK", 7 * task.keys)
    route = some_cells(task, groups.blocks_of(task, task.q, 12), singletons(task.k))
    out, _ = svg_ear.merge(*task.attend(route), svg_ear.skipped_part(task, route))
    torch.testing.assert_close(out, truth, atol=2e-5, rtol=1e-4)
    error = svg_ear.compensation_error(task, route.query, route.kv)
    torch.testing.assert_close(error, torch.zeros_like(error), atol=1e-5, rtol=0)
    torch.testing.assert_close(pisa.taylor(task, route, *task.attend(route), 1)[0], truth, atol=2e-5, rtol=1e-4)


def test_compensation_counts_rows_times_skipped_groups():
    task = task_at(0.22)
    route = some_cells(task, groups.blocks_of(task, task.q, 12), groups.blocks_of(task, task.k, 24))
    rows = torch.stack([(~route.cells[0, h][route.query.labels[0, h]]).sum() for h in range(2)])
    assert svg_ear.skipped_products(task, route) == int(rows.sum())


def clustered(spread: float) -> Task:
    """Six groups of keys, `spread` wide; every query is its own group."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(6, 8, generator=generator).repeat_interleave(10, 0)
    k = centres + spread * torch.randn(60, 8, generator=generator)
    q, v = torch.randn(40, 8, generator=generator), torch.randn(60, 8, generator=generator)
    config = Config(density=0.5, query_groups=40, kv_groups=6, backend="reference")
    return Task(q[None, None], k[None, None], v[None, None], config, 0.35)


def taylor_error(spread: float, order: int) -> float:
    task = clustered(spread)
    route = some_cells(task, singletons(task.q), groups.from_places(task.k, torch.arange(60) // 10), 0.4)
    out, _ = pisa.taylor(task, route, *task.attend(route), order)
    return row_errors(out, dense_reference(task)[0])[0]


def test_taylor_of_order_zero_is_the_centroid_compensation():
    task = clustered(0.3)
    route = some_cells(task, singletons(task.q), groups.from_places(task.k, torch.arange(60) // 10))
    expected, _ = svg_ear.merge(*task.attend(route), svg_ear.skipped_part(task, route))
    torch.testing.assert_close(pisa.taylor(task, route, *task.attend(route), 0)[0], expected)


@pytest.mark.parametrize(("order", "power"), [(0, 1), (1, 2)])
def test_taylor_error_falls_with_the_power_of_the_spread(order, power):
    wide, narrow = taylor_error(0.08, order), taylor_error(0.04, order)
    assert wide / narrow == pytest.approx(2**power, rel=0.15)


def test_keys_that_are_equal_in_a_block_are_exact_in_every_order():
    assert taylor_error(0.0, 0) < 1e-5 and taylor_error(0.0, 1) < 1e-5


def test_antidiagonals_meet_every_row_and_every_column_once():
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(12, 5, generator=generator), torch.randn(8, 5, generator=generator)
    logits = 0.3 * q @ k.mT
    found = xattention.antidiagonal_map(q, k, 0.3, 4)
    for a in range(3):
        for b in range(2):
            tile = logits[4 * a : 4 * a + 4, 4 * b : 4 * b + 4]
            torch.testing.assert_close(found[a, b], tile.flip(1).diagonal().mean())


def test_strided_scores_do_not_depend_on_the_chunk(monkeypatch):
    task = task_at(0.22, heads=1)
    query = groups.blocks_of(task, task.q, 12, 16)
    kv = groups.blocks_of(task, task.k, 24, 16)
    whole = xattention.block_scores(task, query, kv, 16)
    monkeypatch.setattr(xattention, "CHUNK", 1)
    torch.testing.assert_close(xattention.block_scores(task, query, kv, 16), whole)
    assert whole.exp().sum(-1).allclose((query.sizes // 16).float())  # one for every strided row


def test_top_p_keeps_what_a_threshold_would():
    task = task_at(0.3, heads=1)
    query, kv = groups.blocks_of(task, task.q, 12), groups.blocks_of(task, task.k, 24)
    score = selection.centroid_scores(task, query, kv)
    cells = selection.top_p(task, score, query, kv).cells
    before = selection.share_before(score)
    assert before[cells].max() <= before[~cells].min() + 1e-12
    counts = selection.equal_budget(task, score, query, kv).cells.sum(-1)
    assert counts.max() - counts.min() <= 1


def test_tiles_cover_the_grid_and_order_goes_tile_by_tile():
    labels, middle = groups.tile_labels((5, 6), (2, 3))
    assert labels.bincount().tolist() == [6, 6, 6, 6, 3, 3] and len(middle) == 6
    assert middle[0].tolist() == [0.5, 1.0]
    assert groups.tile_shape((1, 64, 64), 64) in [(1, 8, 8), (1, 4, 16), (1, 16, 4)]
    sixteen = torch.zeros(1, 1, 16, 8)
    on_grid = Task(sixteen, sixteen, sixteen, Config(query_groups=4), 1.0, (4, 4))
    order = groups.local_order(on_grid, 16)
    assert order.tolist()[:4] == [0, 1, 4, 5] and sorted(order.tolist()) == list(range(16))


def test_windows_need_tokens_with_places():
    task = replace(task_at(0.22), grid=None)
    assert "grid" in (METHODS["sta"].refuses(task) or "")
    assert METHODS["window"].refuses(task) is None
    shorter = replace(task, k=task.k[:, :, :100], v=task.v[:, :, :100])
    assert METHODS["window"].refuses(shorter)


def test_affinities_group_as_the_products_themselves_would():
    task = task_at(0.22, heads=1)
    others = task.q[:, :, ::40]
    found = svoo.affinity_groups(task, task.k, 8, others, None)
    products = (task.k @ others.mT)[0]  # [1, N, C]
    direct = kmeans(products, 8, svoo.STEPS, backend=task.backend).labels
    assert (found.labels[0] == direct).float().mean() > 0.98  # ties may fall either way


def test_the_registry_knows_names_and_refuses_doubles():
    assert [method.name for method in chosen_methods(["svg2", "dense", "svg2"])] == ["svg2", "dense"]
    assert len(chosen_methods(None)) == len(METHODS) - 2  # variants of Residua's own only if they are named
    with pytest.raises(InputError, match="method 'nothing' is not known; there are: 'dense'"):
        chosen_methods(["nothing"])

    class Double(Method):
        name = "svg2"

    with pytest.raises(ValueError, match="two of kind method"):
        METHODS.register(Double)
    for method in METHODS.values():
        assert method.title and method.source and method.simplified


def test_repeats_are_bit_identical():
    for method in METHODS.values():
        if method.name != "dense":
            assert torch.equal(method.run(task_at(0.22, 1)).out, method.run(task_at(0.22, 1)).out), method.name


def test_queries_and_keys_may_differ_in_number():
    task = task_at(0.3)
    task = replace(task, k=task.k[:, :, :200].contiguous(), v=task.v[:, :, :200].contiguous(), grid=None)
    for method in METHODS.values():
        if method.refuses(task) is None:
            found = method.run(task)
            assert isinstance(found, Outcome) and found.out.shape == task.q.shape
            assert found.executed <= 0.3 * task.possible or method.reference or method.name == "authors"

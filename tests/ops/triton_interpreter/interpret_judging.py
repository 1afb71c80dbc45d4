"""The judge's kernels, and joining two attention outputs, in the interpreter, against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import assert_near, generator, ragged, random, random_drift

from residua.ops.backend import Backend
from residua.ops.triton import TritonBackend
from residua.ops.triton.join import join_rows
from residua.types import Drift, SummaryKeys


class Wide(Backend):
    """Its products keep fp64."""

    def matmul(self, x, y):
        return x @ y


BACKEND, BASE = TritonBackend(), Wide()


def doubled(drift: Drift | None) -> Drift | None:
    return None if drift is None else Drift(*(x.double() for x in vars(drift).values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rank"), [(2, 2, 64, 16), (4, 2, 20, 5), (1, 1, 128, 32), (2, 1, 72, 0)]
)
def test_errors_of_the_candidates(dtype, heads, kv_heads, dim, rank):
    batch, count, groups = 2, 9, 4
    rows = random(batch, heads, count, dim, dtype=dtype)
    group = torch.randint(groups, (batch, heads, count), generator=generator(3))
    exact, sparse, value = (random(batch, heads, count, dim, seed=s) for s in (4, 5, 6))
    lse, top = (random(batch, heads, count, seed=s) for s in (7, 8))
    top[:, :, 0] = -torch.inf  # nothing is skipped
    lse[:, :, 1], sparse[:, :, 1] = -torch.inf, 0.0  # nothing is kept
    exact[:, :, 2] = 0.0  # no length to compare with
    exact[:, 0, 3, 1] = torch.nan
    drift = random_drift(batch, heads, kv_heads, groups, dim, rank) if rank else None
    found = BACKEND.candidate_errors(rows, group, exact, (sparse, lse), (value, top), drift)
    wide = [x.double() for x in (exact, sparse, lse, value, top)]
    wanted = BASE.candidate_errors(
        rows.double(), group, wide[0], (wide[1], wide[2]), (wide[3], wide[4]), doubled(drift)
    )
    assert found.shape == (3 if rank else 2, batch, heads, count)
    assert found.isnan()[..., 0, 3].all()
    rest = torch.ones(count, dtype=torch.bool)
    rest[2] = False  # divided by next to nothing
    torch.testing.assert_close(found[..., rest].double(), wanted[..., rest], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert (found[..., 2] > 1e30).all()


@pytest.mark.parametrize("candidates", [2, 3])
@pytest.mark.parametrize("count", [5, 64, 300])
def test_the_choice(candidates, count):
    errors = random(candidates, 2, 7, count).abs() + 0.1
    errors *= torch.rand(candidates, 2, 7, 1, generator=generator(1)) + 0.5  # so that heads choose differently
    weights = torch.randint(4, (2, 7, count), generator=generator(2)).float()
    weights[1, 0] = 0.0  # a head without a row
    without = torch.rand(2, 7, generator=generator(4)) < 0.3
    errors[0, 0, 3] = torch.nan
    choice, error = BACKEND.best_candidate(errors, weights, without, 0.9)
    wanted = BASE.best_candidate(errors.double(), weights.double(), without, 0.9)
    assert len(set(choice.flatten().tolist())) == candidates
    assert torch.equal(choice, wanted[0])
    torch.testing.assert_close(error.double(), wanted[1], rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("drifts", [True, False])
@pytest.mark.parametrize("slots", [5, 700])
def test_what_a_head_switches_off(drifts, slots):
    heads, groups, dim, rank = 4, 3, 20, 5
    drift = random_drift(2, heads, 2, groups, dim, rank) if drifts else None
    keys = random(2, heads, groups, slots, dim)
    summary = SummaryKeys(keys, keys, random(2, heads, groups, slots, seed=2), drift)
    choice = torch.tensor([[0, 1, 2, 3], [3, 0, 0, 1]])
    wanted = BASE.switch_summary(summary, choice)
    found = BACKEND.switch_summary(summary, choice)
    assert torch.equal(found.log_weight, wanted.log_weight)
    assert (found.log_weight == -torch.inf).any()
    if drifts:
        assert torch.equal(found.drift.curve, wanted.drift.curve)
        assert torch.equal(found.drift.slope, wanted.drift.slope)
    # what is not contiguous is copied, and stays as it was
    spread = random(1, 1, groups, slots, seed=2).expand(2, heads, -1, -1)
    copied = BACKEND.switch_summary(SummaryKeys(keys, keys, spread, None), choice)
    assert torch.isfinite(spread).all()
    assert torch.equal(copied.log_weight == -torch.inf, (choice > 1)[..., None, None].expand_as(spread))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [64, 96])
def test_outputs_over_two_sets_of_keys_are_joined_in_place(dtype, dim):
    heads, rows = 3, 77
    order = ragged(1, heads, rows, 5).order[0]
    out, other = (random(heads, rows, dim, dtype=dtype, seed=s) for s in (1, 2))
    lse, other_lse = (3 * random(heads, rows, seed=s) for s in (3, 4))
    lse[:, 5] = other_lse[:, 7] = -torch.inf
    lse[1], other_lse[1] = -torch.inf, -torch.inf  # a head that sees nothing
    out[:, 5], other[:, 7] = torch.nan, torch.inf  # what has seen nothing may hold anything
    out[1] = torch.nan
    index = order[..., None].expand_as(other)
    moved = torch.empty_like(other).scatter_(1, index, other).double()
    moved_lse = torch.empty_like(other_lse).scatter_(1, order, other_lse).double()
    both = torch.logaddexp(lse.double(), moved_lse)
    wanted = torch.zeros(heads, rows, dim, dtype=torch.float64)
    for values, own in ((out.double(), lse.double()), (moved, moved_lse)):
        wanted += torch.where((own == -torch.inf)[..., None], 0.0, values * (own - both).exp()[..., None])
    join_rows(out, lse, other, other_lse, order)
    assert_near(out, wanted, dtype)
    assert_near(lse, both, dtype)
    assert not out[1].any()

"""Random calls, the same on every machine: `make fuzz SECONDS=600` runs others. Half of the slow ones; the other half
stands in `test_more_cases.py`, so that two workers of pytest-xdist share them."""

import dataclasses

import pytest
import torch

from tests.fuzz.cases import Case, make
from tests.fuzz.checks import PARTS, broken_in, check
from tests.support.sampling import first_is_quick

# Seeds whose cases broke a promise once (docs/reliability.md): all checks, every time.
PAST = (12, 84, 134, 305, 479, 875, 1719, 1104, 1182, 1318, 3004, 3008, 3014, 3027, 3050, 3090, 71693)


@pytest.mark.parametrize("part", first_is_quick(range(0, PARTS, 2)))
def test_random_calls(part):
    assert not broken_in(part)


@pytest.mark.parametrize("seed", first_is_quick(PAST, quick=8))
def test_past_failures(seed):
    assert check(make(seed)) == []


@pytest.mark.parametrize(
    "changes, settings",
    [
        # The probe fit read eigenvectors that were never written: NaN from time to time.
        (
            {"batch": 2, "queries": 300, "keys": 300, "dim": 64, "value_dim": 64, "fill": "zero",
             "where": "q", "dtype": torch.bfloat16, "layout": "misaligned"},
            {"kv_groups": 300, "reconstruction": "probe", "probes": 64, "partition": "semantic"},
        ),
        # Products of torch differed with the number of matrices beside them.
        (
            {"batch": 3, "heads": 4, "kv_heads": 2, "queries": 128, "keys": 128, "dim": 96, "value_dim": 13},
            {"probes": 0, "reconstruction": "tail", "query_groups": 1, "summary_slots": 64, "density": 0.22},
        ),
        (
            {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 200, "keys": 200, "dim": 17, "value_dim": 17},
            {"reconstruction": "anchored", "summary_slots": 3, "drift_rank": 1, "density": 0.5},
        ),
        # A metric of rank 15 in 256 dimensions.
        (
            {"batch": 2, "heads": 2, "kv_heads": 2, "queries": 130, "keys": 130, "dim": 256,
             "value_dim": 256},
            {"kv_groups": 16, "density": 0.001, "partition": "response"},
        ),
        # Ties among all scores.
        (
            {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 130, "keys": 130, "dim": 24, "value_dim": 24,
             "scale": 0.0, "layout": "expanded heads"},
            {"reconstruction": "anchored", "density": 0.3},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", first_is_quick(range(3)))
def test_results_depend_on_the_call_alone(changes, settings, seed):
    base = make(9000 + seed)
    plain: dict = {
        "heads": 1,
        "kv_heads": 1,
        "dtype": torch.float32,
        "layout": "plain",
        "fill": "normal",
        "mask": "random",
        "scale": None,
        "pinned": [],
        "exact": [],
        "steps": 1,
        "isa": None,
    }
    settings = {**base.settings, "backend": "auto", "max_error": None, "balance": False, **settings}
    case: Case = dataclasses.replace(base, **{**plain, **changes}, settings=settings)
    assert check(case) == []

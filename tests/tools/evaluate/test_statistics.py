"""Means and intervals over prompts, against direct computation."""

import random

import numpy as np
import pytest

from residua.tools.evaluate.statistics import bootstrap, estimate, paired, prompt_values, speedups


def rows(values: dict[tuple[str, int], float | None], column: str = "psnr") -> list[dict]:
    return [{"prompt": prompt, "seed": seed, column: value} for (prompt, seed), value in values.items()]


def test_seeds_are_averaged_before_prompts():
    found = prompt_values(rows({("a", 0): 1.0, ("a", 1): 3.0, ("b", 0): 10.0, ("c", 0): None}), "psnr")
    assert sorted(found.values()) == [2.0, 10.0]
    told = estimate(found)
    assert told.mean == 6.0 and told.median == 6.0 and told.prompts == 2


def test_no_order_and_no_shards_change_a_mean():
    generator = random.Random(0)
    values = {(f"p{i}", seed): generator.gauss(30, 5) for i in range(57) for seed in range(3)}
    plain = rows(values)
    whole = estimate(prompt_values(plain, "psnr"))
    for shards in (2, 7):
        parts = [plain[place::shards] for place in range(shards)]
        joined = estimate(prompt_values([row for part in reversed(parts) for row in part], "psnr"))
        assert joined == whole
    direct = np.array(list(values.values())).reshape(57, 3).mean(1).mean()
    assert abs(whole.mean - direct) <= 1e-9


def test_the_interval_covers_the_mean_of_a_known_distribution():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        low, high = bootstrap(generator.normal(3.0, 2.0, size=40))
        covered += low <= 3.0 <= high
    assert 50 <= covered <= 60
    low, high = bootstrap(generator.normal(3.0, 2.0, size=400))
    assert 0.3 < high - low < 0.5  # 2 * 1.96 * 2 / sqrt(400) = 0.39


def test_one_prompt_has_no_interval_and_none_no_estimate():
    assert estimate({"a": 2.0}).low is None and not estimate({"a": 2.0}).excludes_zero
    assert estimate({}) is None


def test_pairs_are_the_prompts_that_both_have():
    first = {f"p{i}": 30.0 + i for i in range(8)}
    second = {f"p{i}": 29.5 + i for i in range(1, 20)}
    told = paired(first, second)
    assert told.prompts == 7 and told.mean == pytest.approx(0.5) and not told.excludes_zero  # too few
    told = paired({**first, "p8": 38.0}, second)
    assert told.prompts == 8 and told.mean == pytest.approx(0.5) and told.excludes_zero
    noise = {name: value + (-1) ** i for i, (name, value) in enumerate(first.items())}
    assert len(noise) == 8 and not paired(first, noise).excludes_zero


def test_speedups_compare_only_what_ran_on_one_hardware():
    dense = [{"id": "d1", "hardware": "x", "seconds": 8.0}, {"id": "d2", "hardware": "x", "seconds": 6.0}]
    sparse = [
        {"prompt": "a", "reference": "d1", "hardware": "x", "seconds": 2.0},
        {"prompt": "b", "reference": "d2", "hardware": "y", "seconds": 1.0},
        {"prompt": "c", "reference": "d3", "hardware": "x", "seconds": 1.0},
    ]
    assert list(speedups(sparse, dense).values()) == [4.0]


def test_a_metric_that_is_not_finite_has_no_part_in_an_interval():
    found = prompt_values(rows({("a", 0): 1.0, ("b", 0): float("nan"), ("c", 0): float("inf")}), "psnr")
    assert list(found.values()) == [1.0] and estimate(found).low is None

"""Means, medians, intervals and paired differences over prompts.

The unit is the prompt: values of several seeds are averaged first, because two seeds of a prompt do not count as two
prompts. Sums are exact (`math.fsum`), so that neither the order of rows nor the number of shards changes a mean.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

RESAMPLES = 4000
ENOUGH_PROMPTS = 8  # with fewer, a percentile bootstrap gives intervals that are too narrow
INTERVAL = 0.95
MAX_SHARES = 1 << 22  # maximum of entries of one part of the resamples
PromptValues = dict[str, float]  # prompt -> mean over its seeds


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval; `low` and `high` are None below two prompts."""

    mean: float
    median: float
    low: float | None
    high: float | None
    prompts: int
    quartiles: tuple[float, float]

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero; False if there are too few prompts to trust the interval."""
        if self.low is None or self.high is None or self.prompts < ENOUGH_PROMPTS:
            return False
        return self.low > 0 or self.high < 0


def prompt_values(rows: Iterable[Mapping[str, Any]], column: str) -> PromptValues:
    """The mean of a column over the seeds of each prompt; rows without a value are left out."""
    values: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(column)
        if value is not None and math.isfinite(value):
            values.setdefault(prompt_key(row), []).append(float(value))
    return {prompt: math.fsum(found) / len(found) for prompt, found in values.items()}


def prompt_key(row: Mapping[str, Any]) -> str:
    """What identifies a prompt: PBench has several videos with the same text."""
    return f"{row.get('prompt_name') or ''}\n{row['prompt']}"


def estimate(values: PromptValues) -> Estimate | None:
    """The estimate for a metric or a difference; None without any value."""
    if not values:
        return None
    ordered = np.array([values[prompt] for prompt in sorted(values)])
    low, high = bootstrap(ordered)
    quarters = np.quantile(ordered, [0.25, 0.75])
    return Estimate(
        math.fsum(ordered.tolist()) / len(ordered),
        float(np.median(ordered)),
        low,
        high,
        len(ordered),
        (float(quarters[0]), float(quarters[1])),
    )


def bootstrap(values: np.ndarray) -> tuple[float | None, float | None]:
    """The percentile interval of the mean of [P] values; always the same for the same values."""
    if len(values) < 2:
        return None, None
    means = np.concatenate([shares @ values for shares in _resamples(len(values))])
    outside = (1 - INTERVAL) / 2
    low, high = np.quantile(means, [outside, 1 - outside])
    return float(low), float(high)


@lru_cache(maxsize=8)
def _resamples(prompts: int) -> list[np.ndarray]:
    """How often each prompt is drawn, as shares [resamples, prompts], in parts; the same for every metric."""
    generator = np.random.default_rng(0)
    parts = max(1, RESAMPLES * prompts // MAX_SHARES)
    sizes = [len(part) for part in np.array_split(np.arange(RESAMPLES), parts)]
    even = np.full(prompts, 1 / prompts)
    return [generator.multinomial(prompts, even, size=size).astype(np.float32) / prompts for size in sizes]


def paired(first: PromptValues, second: PromptValues) -> Estimate | None:
    """The estimate of `first - second` over the prompts that both have."""
    return estimate({prompt: first[prompt] - second[prompt] for prompt in first if prompt in second})


def speedups(rows: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]) -> PromptValues:
    """Dense over sparse seconds of the same prompt and seed, where both ran on the same hardware."""
    known = {row["id"]: row for row in dense}
    ratios = []
    for row in rows:
        other = known.get(row["reference"])
        if other is not None and other["hardware"] == row["hardware"] and row["seconds"] and other["seconds"]:
            ratios.append({**row, "ratio": other["seconds"] / row["seconds"]})
    return prompt_values(ratios, "ratio")

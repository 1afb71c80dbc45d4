"""Stored estimates: what the static model said about a grid of calls, read without a compiler.

`estimates.json` is written by `python -m dev.gpu_model.table`. Between its points milliseconds follow
a power of the token count and a line in the density; outside of them the nearest two points are drawn out.
"""

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .speeds import find_gpu

STEP, MAX_TOKENS = 1024, 1 << 17
TYPICAL_HEADS, TYPICAL_DENSITY = 24, 0.22
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class StoredEstimate:
    """A warm call by the static model. Nothing of it was measured on a GPU."""

    ms: float
    grouping_ms: float
    attention_ms: float  # the exact pairs and the summary
    launches: int
    peak_gib: float  # above q, k and v
    dense_ms: float  # the same call by the dense kernel that pipelines run


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def stored_gpus() -> list[str]:
    """The GPUs that the table has."""
    return list(dict.fromkeys(row["gpu"] for row in _table()["calls"]))


def stored_estimate(gpu: str, tokens: int, heads: int, density: float, head_dim: int = 128) -> StoredEstimate | None:
    """A warm call of that shape on that GPU; None if the table does not have the GPU.

    Args:
        gpu: a name that `find_gpu` knows.
        tokens: queries, as many as keys.
        heads: query heads of all batch entries together.
        density: share of the pairs that the call may spend.
        head_dim: channels of a head; other than 128 they scale what grows with the heads.
    """
    device = find_gpu(gpu)
    rows = [row for row in _table()["calls"] if row["gpu"] == device.name]
    if not rows:
        return None
    wide = head_dim / _table()["head_dim"]

    def total(name: str) -> float:
        fixed = _between(rows, f"{name}_ms", tokens, density)
        return fixed + heads * wide * _between(rows, f"{name}_ms_per_head", tokens, density)

    nearest = min(rows, key=lambda row: abs(math.log(row["tokens"] / tokens)))
    return StoredEstimate(
        ms=max(total("call"), nearest["host_ms"]),
        grouping_ms=total("grouping"),
        attention_ms=total("attention"),
        launches=nearest["launches"],
        peak_gib=heads * wide * _between(rows, "peak_gib_per_head", tokens, density),
        dense_ms=4 * float(tokens) ** 2 * head_dim * heads / 1e9 / device.dense,
    )


@lru_cache(maxsize=16)
def break_even(gpu: str) -> int:
    """Tokens from which a warm call by default takes no longer than dense attention, in steps of 1024; `accelerate`
    knows these numbers (`residua.hosts.settings`)."""
    for tokens in range(STEP, MAX_TOKENS, STEP):
        found = stored_estimate(gpu, tokens, TYPICAL_HEADS, TYPICAL_DENSITY)
        if found is not None and found.ms <= found.dense_ms:
            return tokens
    return MAX_TOKENS


def _between(rows: list[dict[str, Any]], name: str, tokens: int, density: float) -> float:
    """A column of the table at a place that may lie between its points."""
    counts = sorted({row["tokens"] for row in rows})
    low, high = _neighbours(counts, tokens)
    at_low, at_high = (_by_density([r for r in rows if r["tokens"] == n], name, density) for n in (low, high))
    if at_low <= 0 or at_high <= 0 or low == high:  # a power needs two positive points
        return at_low if abs(tokens - low) <= abs(tokens - high) else at_high
    power = math.log(at_high / at_low) / math.log(high / low)
    return float(at_low * (tokens / low) ** power)


def _by_density(rows: list[dict[str, Any]], name: str, density: float) -> float:
    known = {row["density"]: row[name] for row in rows}
    low, high = _neighbours(sorted(known), density)
    if low == high:
        return float(known[low])
    drawn = known[low] + (known[high] - known[low]) * (density - low) / (high - low)
    return max(0.0, float(drawn))


def _neighbours(points: list[Any], place: float) -> tuple[Any, Any]:
    """The two points that lie around a place, or the two nearest to it."""
    if len(points) == 1:
        return points[0], points[0]
    above = min(max(1, bisect_left(points, place)), len(points) - 1)
    return points[above - 1], points[above]

"""Estimates of many calls, made once and kept in the package: `estimates.json`, for those who cannot wait for
a compiler. `python -m residua.bench.static.table` writes it anew."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import Config
from .gpus import GPUS
from .model import Estimate, Task, add_up, compile_launches, signature, tiles_of
from .stored import FILE
from .trace import trace_call

TOKENS = (8192, 32768, 75600)
DENSITIES = (0.05, 0.22)
HEADS = (8, 40)  # two counts give the part that does not depend on them
HEAD_DIM = 128


def make_table(
    names: Sequence[str] = tuple(GPUS),
    tokens: Sequence[int] = TOKENS,
    densities: Sequence[float] = DENSITIES,
    workers: int | None = None,
) -> dict[str, Any]:
    """For every GPU, token count and density: milliseconds of a warm call, fixed and per head, launches and
    memory."""
    codes: dict[int, dict[tuple[Any, ...], Any]] = {}
    rows = []
    for name in names:
        known = codes.setdefault(GPUS[name].arch, {})
        for count in tokens:
            for density in densities:
                few, many = (_estimate(name, count, density, heads, known, workers) for heads in HEADS)
                rows.append({"gpu": name, "tokens": count, "density": density} | _line(few, many))
                print(f"{name}, {count} tokens, density {density}", file=sys.stderr, flush=True)
    return {"head_dim": HEAD_DIM, "calls": rows}


def _estimate(
    name: str, tokens: int, density: float, heads: int, codes: dict[tuple[Any, ...], Any], workers: int | None
) -> Estimate:
    """One estimate; what was compiled before for the same architecture is in `codes`, and stays there."""
    gpu, task = GPUS[name], Task(tokens, HEADS[0], HEAD_DIM, density)
    trace = trace_call(
        Config(density=density), tokens=tokens, heads=heads, head_dim=HEAD_DIM, processors=gpu.processors,
        arch=gpu.arch,
    )  # fmt: skip
    new = [launch for launch in trace.launches if signature(launch) not in codes]
    codes |= compile_launches(new, gpu.arch, workers) if new else {}
    return add_up(replace(task, heads=heads), gpu, trace, tiles_of(trace, task), codes)


def _line(few: Estimate, many: Estimate) -> dict[str, float]:
    """Milliseconds, bytes and memory as fixed + per_head * heads."""
    step = HEADS[1] - HEADS[0]
    found: dict[str, float] = {}
    parts = {"call": [sum(stage.ms for stage in one.stages) for one in (few, many)]}
    for stage in ("grouping", "attention"):
        parts[stage] = [next(s.ms for s in one.stages if s.stage == stage) for one in (few, many)]
    for name, (low, high) in parts.items():
        found[f"{name}_ms_per_head"] = round(max(0.0, high - low) / step, 5)
        found[f"{name}_ms"] = round(max(0.0, low - HEADS[0] * (high - low) / step), 5)
    found["host_ms"] = round(many.host_ms, 3)
    found["launches"] = many.launches
    found["gigabytes_per_head"] = round(many.gigabytes / HEADS[1], 5)
    found["peak_gib_per_head"] = round(many.peak_gib / HEADS[1], 5)
    found["utilisation"] = round(many.tiles.utilisation, 4)
    return found


def write(names: Sequence[str]) -> None:
    """Puts the GPUs of those names into the table, and leaves the others in it as they are."""
    kept = json.loads(FILE.read_text())["calls"] if FILE.exists() else []
    made = make_table(names)["calls"]
    rows = [row for row in kept if row["gpu"] not in names] + made
    rows.sort(key=lambda row: (list(GPUS).index(row["gpu"]), row["tokens"], row["density"]))
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    FILE.write_text(f'{{"head_dim": {HEAD_DIM}, "calls": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    write(tuple(sys.argv[1:]) or tuple(GPUS))

"""Estimates of many calls, as the table that `residua plan` reads: `python -m residua.bench.static.table`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...config import Config
from .gpus import GPUS
from .model import Task, add_up, compile_launches, tiles_of
from .trace import trace_call

TOKENS = (8192, 32768, 75600)
DENSITIES = (0.05, 0.22)
HEADS = (8, 32)
HEAD_DIM = 128


def make_table(names: Sequence[str] = tuple(GPUS), tokens: Sequence[int] = TOKENS) -> dict[str, Any]:
    """For every GPU, token count and density: milliseconds of a call and per head, of which grouping and
    attention; launches and peak memory.

    Two head counts give the part that does not depend on them.
    """
    rows: list[dict[str, Any]] = []
    for name in names:
        gpu = GPUS[name]
        codes: dict[tuple[Any, ...], Any] = {}
        for count in tokens:
            traces = {
                heads: trace_call(
                    Config(),
                    tokens=count,
                    heads=heads,
                    head_dim=HEAD_DIM,
                    processors=gpu.processors,
                    arch=gpu.arch,
                )
                for heads in HEADS
            }
            for trace in traces.values():
                codes |= compile_launches(trace.launches, gpu.arch, 1)
            for density in DENSITIES:
                task = Task(count, HEADS[0], HEAD_DIM, density)
                tiles = tiles_of(traces[HEADS[0]], task)
                few, many = (
                    add_up(replace(task, heads=heads), gpu, trace, tiles, codes)
                    for heads, trace in traces.items()
                )
                rows.append({"gpu": name, "tokens": count, "density": density} | _line(few, many))
                print(f"{name}, {count} tokens, density {density}", file=sys.stderr, flush=True)
    return {"head_dim": HEAD_DIM, "calls": rows}


def _line(few: Any, many: Any) -> dict[str, float]:
    """Milliseconds as fixed + per_head * heads."""
    step = HEADS[1] - HEADS[0]
    found: dict[str, float] = {}
    totals = [sum(stage.ms for stage in one.stages) for one in (few, many)]
    parts = {"call": totals}
    for stage in ("grouping", "attention"):
        parts[stage] = [next(s.ms for s in one.stages if s.stage == stage) for one in (few, many)]
    for name, (low, high) in parts.items():
        found[f"{name}_ms_per_head"] = round((high - low) / step, 5)
        found[f"{name}_ms"] = round(max(0.0, low - HEADS[0] * (high - low) / step), 5)
    found["host_ms"] = round(many.host_ms, 3)
    found["launches"] = many.launches
    found["peak_bytes_per_head"] = round((many.peak_gib - few.peak_gib) * 2**30 / step)
    return found


if __name__ == "__main__":
    print(json.dumps(make_table(tuple(sys.argv[1:]) or tuple(GPUS)), indent=1))

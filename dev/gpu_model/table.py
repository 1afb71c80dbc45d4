"""Estimates of many calls, made once and kept in the package: `estimates.json`, for those who cannot wait for
a compiler. `python -m dev.gpu_model.table` writes it anew."""

import json
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from dev.gpu_model.model import Codes, Estimate, Task, estimate
from residua.tools.plan.estimates import FILE
from residua.tools.plan.speeds import GPUS

TOKENS = (8192, 32768, 75600)
DENSITIES = (0.05, 0.22)
HEADS = (8, 40)  # two counts give the part that does not depend on them
HEAD_DIM = 128


def make_table(
    names: Sequence[str] = tuple(GPUS),
    tokens: Sequence[int] = TOKENS,
    densities: Sequence[float] = DENSITIES,
    workers: int | None = None,
    codes: dict[int, Codes] | None = None,
) -> dict[str, Any]:
    """For every GPU, token count and density: milliseconds of a warm call, fixed and per head, launches and
    memory. What is compiled on the way is put into `codes`, by architecture."""
    codes = {} if codes is None else codes
    rows = []
    for name, count, density in product(names, tokens, densities):
        gpu = GPUS[name]
        known = codes.setdefault(gpu.arch, {})
        few, many = (estimate(Task(count, heads, HEAD_DIM, density), gpu, workers, known) for heads in HEADS)
        rows.append({"gpu": name, "tokens": count, "density": density} | _line(few, many))
        print(f"{name}, {count} tokens, density {density}", file=sys.stderr, flush=True)
    return {"head_dim": HEAD_DIM, "calls": rows}


def _mean_ms(found: Estimate, stage: str) -> float:
    """Of a stage, or of all of them."""
    both = [found] if found.kept is None else [found, *[found.kept] * (found.regroup_every - 1)]
    return sum(s.ms for one in both for s in one.stages if stage in ("", s.stage)) / len(both)


def _line(few: Estimate, many: Estimate) -> dict[str, float]:
    """Milliseconds as fixed + per_head * heads, the mean over calls that share their groups; bytes, launches
    and memory of the one that clusters."""
    step = HEADS[1] - HEADS[0]
    found: dict[str, float] = {}
    stages = ("", "grouping", "attention")
    parts = {stage or "call": [_mean_ms(one, stage) for one in (few, many)] for stage in stages}
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
    """Puts the GPUs of those names into the table, one after the other, and leaves the others in it as they
    are."""
    codes: dict[int, Codes] = {}
    for name in names:
        made = make_table([name], codes=codes)["calls"]
        kept = json.loads(FILE.read_text())["calls"] if FILE.exists() else []
        rows = [row for row in kept if row["gpu"] != name] + made
        rows.sort(key=lambda row: (list(GPUS).index(row["gpu"]), row["tokens"], row["density"]))
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        FILE.write_text(f'{{"head_dim": {HEAD_DIM}, "calls": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    write(tuple(sys.argv[1:]) or tuple(GPUS))

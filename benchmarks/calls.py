"""Partition x repair on recorded attention calls: mean and p99 of the relative row error, unprobed rows only.

    python benchmarks/calls.py FOLDER [--density 0.22]

FOLDER holds safetensors files with q, k, v of shape [N, D] (one head) or [B, H, N, D].
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file

from residua import Config
from residua.execution.backend import Demand, select
from residua.grouping.partition import group_tokens
from residua.inputs import judge
from residua.metrics import row_errors
from residua.probes import take_probes
from residua.repair import apply, fit
from residua.routing import route_cells
from residua.sizing import resolve
from residua.types import Call

PARTITIONS = ("semantic", "key-response", "response")


def errors(call: Call, dense: torch.Tensor, config: Config) -> dict[str, tuple[float, float]]:
    """Hard drop and probe repair on the same route and the same probes."""
    backend = select(config.backend, Demand.of(call))
    sizes = resolve(config, call)
    grouping = group_tokens(call, config, sizes, None, backend)
    route = route_cells(call, grouping, config.density, sizes.probes, config.score, backend)
    out, _ = backend.attend(call.q, call.k, call.v, route, call.scale)
    probes = take_probes(call, grouping, sizes.probes, config.probe_policy, backend)
    hard = row_errors(out, dense, probes.rows)
    missed, x = probes.residual(out)
    repair = fit(x, missed, probes.weights, sizes.repair_rank, config.ridge, config.subspace)
    repaired = apply(out, repair, probes, call.q.dtype, backend)
    return {"hard": hard, "probe": row_errors(repaired, dense, probes.rows)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--density", type=float, default=0.22)
    parser.add_argument("--query-groups", type=int)
    parser.add_argument("--kv-groups", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    files = sorted(args.folder.glob("*.safetensors"))
    for file in files:
        tensors = load_file(file)
        q, k, v = (tensors[name].float().view(-1, 1, *tensors[name].shape[-2:]) for name in "qkv")
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        for partition in PARTITIONS:
            config = Config(
                density=args.density,
                partition=partition,
                query_groups=args.query_groups,
                kv_groups=args.kv_groups,
            )
            for repair, pair in errors(judge(q, k, v), dense, config).items():
                for source in ("all", file.name.split("_")[0]):
                    found.setdefault(f"{source}: {partition} / {repair}", []).append(pair)
    summary = {}
    for name, pairs in sorted(found.items()):
        mean, p99 = (statistics.mean(column) for column in zip(*pairs, strict=True))
        summary[name] = {"mean": mean, "p99": p99, "calls": len(pairs)}
    for name, row in summary.items():
        print(f"{name:40s} mean {row['mean']:.4f}  p99 {row['p99']:.4f}  ({row['calls']} calls)")
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()

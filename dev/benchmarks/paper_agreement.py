"""How exactly `Config.paper()` is the paper: every recorded call against `residua.method.naive_paper`, in fp64, which
shares no code with the rest of the package.

    residua capture --out captures && python -m dev.benchmarks.paper_agreement captures
    python -m dev.benchmarks.paper_agreement captures --density 0.1 --backend torch --calls 4

For each call it prints how many tokens the two put into different groups (rows between two centres, by
rounding), whether they keep the same cells and take the same probes, and the largest and the mean difference
of a row, as a share of the row's norm. Where groups differ, the rest is compared on the package's groups. A
few seconds for each call of 4,096 tokens.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import residua
from residua import Config
from residua.method.grouping.partition import group_tokens
from residua.method.naive_paper import PaperResult, PaperSettings, paper
from residua.method.reconstructions import RECONSTRUCTIONS
from residua.method.rules import CPU
from residua.method.sizes import resolve
from residua.method.stages import SizedCall
from residua.ops.backend import Backend, Demand
from residua.ops.select import choose_backend
from residua.tools.capture.captures import read_captures
from residua.types import Call


@dataclass(frozen=True)
class Agreement:
    """What the package and the naive version make of one call of one head."""

    moved: int  # tokens in other groups
    same_cells: bool
    same_probes: bool
    weights: float  # largest relative difference of the probes' weights
    worst: float  # row
    mean: float

    def __str__(self) -> str:
        cells, probes = ("same" if same else "OTHER" for same in (self.same_cells, self.same_probes))
        return (
            f"{self.moved:6d} moved  {cells} cells  {probes} probes  weights {self.weights:.0e}  "
            f"worst row {self.worst:.1e}  mean {self.mean:.1e}"
        )


def settings_of(config: Config, call: Call) -> PaperSettings:
    sizes = resolve(config, call, CPU)
    return PaperSettings(
        config.density,
        sizes.query_groups,
        sizes.kv_groups,
        sizes.key_rank,
        sizes.query_rank,
        sizes.metric_rows,
        config.kmeans_cold,
        sizes.probes,
        sizes.residual_rank,
        config.ridge,
    )


def agreement(call: Call, config: Config) -> Agreement:
    """One call of one head, without text tokens."""
    backend = choose_backend(config.backend, Demand.of(call))
    with torch.no_grad(), backend.session() as backend:
        ours = _package(call, config, backend)
    q, k, v = (x[0, 0].double().numpy() for x in (call.q, call.k, call.v))
    settings = settings_of(config, call)
    theirs = paper(q, k, v, settings)
    moved = int((ours.key_labels != theirs.key_labels).sum() + (ours.query_labels != theirs.query_labels).sum())
    if moved:
        theirs = paper(q, k, v, settings, (ours.query_labels, ours.key_labels))
    difference = np.linalg.norm(ours.out - theirs.out, axis=1) / np.linalg.norm(theirs.out, axis=1)
    same_probes = sorted(ours.rows) == sorted(theirs.rows)
    by_row = (np.argsort(ours.rows), np.argsort(theirs.rows))
    weights = np.abs(ours.weights[by_row[0]] / theirs.weights[by_row[1]] - 1).max() if same_probes else np.inf
    same_cells = bool((ours.cells == theirs.cells).all())
    return Agreement(moved, same_cells, same_probes, weights, difference.max(), difference.mean())


def _package(call: Call, config: Config, backend: Backend) -> PaperResult:
    """What `residua.attention` returns, and what its stages pass on to each other."""
    sized, method = SizedCall.of(call, config, backend), RECONSTRUCTIONS[config.reconstruction]
    grouping = group_tokens(sized)
    allowed = torch.full(call.q.shape[:2], config.density, dtype=torch.float64)
    grouped = sized.grouped(grouping, allowed)
    routing = method.route(grouped)
    verdict = method.judge(grouped, routing, None)
    assert verdict.probes is not None
    out = residua.attention(call.q, call.k, call.v, config, scale=call.scale)
    return PaperResult(
        out[0, 0].double().numpy(),
        grouping.kv.labels[0, 0].numpy(),
        grouping.query.labels[0, 0].numpy(),
        verdict.route.cells[0, 0].numpy(),
        verdict.probes.rows[0, 0].numpy(),
        verdict.probes.weights[0, 0].numpy(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("captures", type=Path, help="folder of recorded calls")
    parser.add_argument("--density", type=float, default=0.22)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--calls", type=int, help="only the first few")
    given = parser.parse_args()
    config = Config.paper(density=given.density, backend=given.backend)
    found = []
    for captured in list(read_captures(given.captures))[: given.calls]:
        one = agreement(captured.call(), config)
        print(f"{captured.model} {captured.name}: {one}", flush=True)
        found.append(one)
    cells, probes = sum(x.same_cells for x in found), sum(x.same_probes for x in found)
    print(
        f"{len(found)} call(s), backend {given.backend}: worst row {max(x.worst for x in found):.1e}; same "
        f"cells in {cells}, same probes in {probes}; {sum(x.moved for x in found)} tokens in other groups"
    )


if __name__ == "__main__":
    main()

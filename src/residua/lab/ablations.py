"""The paper's ablations (section 5.2) on captured calls. In every table all variants evaluate the same number
of routed pairs, the probe rows are the same wherever they are not what is compared, and errors are those of
rows that no variant has probed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from ..config import Config
from ..sizing import resolve
from ..types import Grouping, Probes
from .captures import CapturedCall
from .study import Sparse, Study

DENSITIES = (0.12, 0.17, 0.22, 0.28, 0.35)
PROBE_COUNTS = (16, 32, 64, 128, 256)
RANKS = (4, 8, 16, 32, 64)
COLD_STEPS = (1, 2, 5, 10, 25)
WARM_STEPS = (1, 2, 4, 8)
RANDOM_DRAWS = 3

PARTITION_TABLE, DENSITY_TABLE, PROBE_TABLE = (
    "partition and reconstruction",
    "density",
    "probes and estimator",
)
COUNT_TABLE, RANK_TABLE, ITERATION_TABLE = "probe count", "reconstruction rank", "k-means iterations"

SEMANTIC, KEY_RESPONSE = "semantic partition", "key-response K/V partition"
RESPONSE, SEMANTIC_RECONSTRUCTED = "response-coupled partition", "semantic partition + probe reconstruction"
OWN_PROBES = "semantic partition + probe reconstruction, probes of its own"
SPARSEPR = "SparsePR"
RANDOM, UNIFORM, STRATIFIED = (
    "random probes (mean of 3 draws)",
    "uniform spatiotemporal probes",
    "stratified probes",
)
RIDGE, SUBSPACE = "ridge only", "ridge + probe-residual subspace"


@dataclass(frozen=True)
class Result:
    """Error of one variant on one call."""

    table: str
    setting: str
    model: str
    call: str
    mean: float
    p99: float
    density: float  # executed pairs over all, probe rows included where they are used


class Ablation:
    """The tables of one call."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.config = study.config
        self.sizes = resolve(study.config, study.call)
        self.response = study.sparse(self._config("response"))
        self.probes = study.probes(self.response.grouping, self.sizes.probes, "stratified")

    def _config(self, partition: str, density: float | None = None) -> Config:
        return self.config.replace(partition=partition, density=density or self.config.density)

    def _result(
        self, table: str, setting: str, errors: tuple[float, float], routed: float, probes: int
    ) -> Result:
        captured = self.study.captured
        density = routed + probes / captured.tokens
        return Result(table, setting, captured.model, captured.name, *errors, density)

    def _reconstructed(
        self, sparse: Sparse, probes: Probes, rank: int | None = None, subspace: bool = True
    ) -> Tensor:
        rank = self.sizes.residual_rank if rank is None else rank
        return self.study.reconstruction(sparse, probes, rank, self.config.ridge, subspace)

    def partition_and_reconstruction(self) -> Iterator[Result]:
        """Table 2."""
        study, count = self.study, self.sizes.probes
        semantic = study.sparse(self._config("semantic"))
        key_response = study.sparse(self._config("key-response"))
        own = study.probes(semantic.grouping, count, "stratified")
        hard = {SEMANTIC: semantic, KEY_RESPONSE: key_response, RESPONSE: self.response}
        reconstructed = {
            SEMANTIC_RECONSTRUCTED: (semantic, self.probes),
            OWN_PROBES: (semantic, own),
            SPARSEPR: (self.response, self.probes),
        }
        for setting, sparse in hard.items():
            errors = study.errors(sparse.out, self.probes, own)
            yield self._result(PARTITION_TABLE, setting, errors, sparse.density, 0)
        for setting, (sparse, probes) in reconstructed.items():
            errors = study.errors(self._reconstructed(sparse, probes), self.probes, own)
            yield self._result(PARTITION_TABLE, setting, errors, sparse.density, count)

    def density_sweep(self, densities: Sequence[float] = DENSITIES) -> Iterator[Result]:
        """Table 3; the setting is `method @ density`."""
        study = self.study
        for density in densities:
            kept = resolve(self._config("response", density), study.call).probes
            for partition, hard, reconstructed in (
                ("semantic", SEMANTIC, SEMANTIC_RECONSTRUCTED),
                ("response", RESPONSE, SPARSEPR),
            ):
                sparse = study.sparse(self._config(partition, density))
                grouping = study.group(self._config("response", density))
                probes = study.probes(grouping, kept, "stratified")
                errors = study.errors(sparse.out, probes)
                yield self._result(DENSITY_TABLE, f"{hard} @ {density:g}", errors, sparse.density, 0)
                errors = study.errors(self._reconstructed(sparse, probes), probes)
                yield self._result(
                    DENSITY_TABLE, f"{reconstructed} @ {density:g}", errors, sparse.density, kept
                )

    def probe_design(self) -> Iterator[Result]:
        """Table 4, with the response-coupled partition."""
        study, count, grouping = self.study, self.sizes.probes, self.response.grouping
        random = [study.probes(grouping, count, "random", seed) for seed in range(RANDOM_DRAWS)]
        uniform = self._uniform(count)
        every = (self.probes, uniform, *random)

        def errors(probes: Probes, subspace: bool = True) -> tuple[float, float]:
            return study.errors(self._reconstructed(self.response, probes, subspace=subspace), *every)

        drawn = [errors(probes) for probes in random]
        stratified = errors(self.probes)
        found = {
            RANDOM: (fmean(mean for mean, _ in drawn), fmean(p99 for _, p99 in drawn)),
            UNIFORM: errors(uniform),
            STRATIFIED: stratified,
            RIDGE: errors(self.probes, subspace=False),
            SUBSPACE: stratified,
        }
        for setting, pair in found.items():
            yield self._result(PROBE_TABLE, setting, pair, self.response.density, count)

    def _uniform(self, count: int) -> Probes:
        """Evenly spread over frames, height and width; over the sequence if the grid is not known."""
        study, grid = self.study, self.study.captured.grid
        if grid is None or grid[0] * grid[1] * grid[2] != len(study.rows):
            return study.probes(self.response.grouping, count, "uniform")
        rows = study.rows[lattice(grid, count)][None, None]
        return study.at(rows, study.weights(self.response.grouping, rows))

    def probe_budget(self) -> Iterator[Result]:
        """More probes, and more directions, on the same route."""
        study, grouping = self.study, self.response.grouping
        counts = [count for count in PROBE_COUNTS if count <= len(study.rows) // 4]
        sets = {count: study.probes(grouping, count, "stratified") for count in counts}
        for count, probes in sets.items():
            rank = min(self.sizes.residual_rank, count)
            errors = study.errors(self._reconstructed(self.response, probes, rank), *sets.values())
            yield self._result(COUNT_TABLE, f"{count}", errors, self.response.density, count)
        for rank in RANKS:
            if rank <= min(study.call.v.shape[-1], self.sizes.probes):
                errors = study.errors(self._reconstructed(self.response, self.probes, rank), self.probes)
                routed, count = self.response.density, self.sizes.probes
                yield self._result(RANK_TABLE, f"{rank}", errors, routed, count)

    def iterations(self, earlier: tuple[Tensor, Tensor] | None) -> Iterator[Result]:
        """K-means steps from a cold start, and from the centroids of an earlier step of the same site."""
        study, base = self.study, self._config("response")
        for steps in COLD_STEPS:
            config = base.replace(kmeans_cold=steps)
            yield from self._iterated(f"cold, {steps}", study.group(config))
        for steps in WARM_STEPS if earlier is not None else ():
            config = base.replace(kmeans_warm=steps)
            yield from self._iterated(f"warm, {steps}", study.group(config, earlier))

    def _iterated(self, setting: str, grouping: Grouping) -> Iterator[Result]:
        sparse = self.study.sparse(self._config("response"), grouping)
        errors = self.study.errors(self._reconstructed(sparse, self.probes), self.probes)
        yield self._result(ITERATION_TABLE, setting, errors, sparse.density, self.sizes.probes)

    @property
    def centroids(self) -> tuple[Tensor, Tensor]:
        """What the next step of this site may start from."""
        grouping = self.response.grouping
        return grouping.query_centroids, grouping.kv_centroids[..., : self.sizes.kv_groups, :]


def lattice(grid: tuple[int, int, int], count: int) -> Tensor:
    """`count` tokens spread evenly over a grid, in its raster order; where no lattice has that many points,
    evenly spaced tokens fill up.  # [count] int64"""
    frames, height, width = grid
    best, best_score = (1, 1, 1), (0, 0.0)
    for a in range(1, min(frames, count) + 1):
        for b in range(1, min(height, count // a) + 1):
            c = min(width, count // (a * b))
            gaps = torch.tensor([frames / a, height / b, width / c])
            score = (a * b * c, -float(gaps.log().var()))
            if score > best_score:
                best, best_score = (a, b, c), score
    t, y, x = (
        (torch.arange(n) * 2 + 1) * side // (2 * n) for n, side in zip(best, grid, strict=True)
    )  # centres of equal cells
    rows = ((t[:, None, None] * height + y[:, None]) * width + x).flatten()
    rest = torch.ones(frames * height * width, dtype=torch.bool)
    rest[rows] = False
    others = rest.nonzero()[:, 0]
    missing = min(count - len(rows), len(others))
    fill = others[torch.arange(missing) * len(others) // max(1, missing)]
    return torch.cat([rows, fill]).sort().values


def in_order(calls: Sequence[CapturedCall]) -> list[CapturedCall]:
    """Sites together, their steps in time."""
    return sorted(
        calls, key=lambda call: (call.model, str(call.layer), call.head, call.branch, call.step or 0)
    )


def site(call: CapturedCall) -> tuple[str, int | str, int, str]:
    return call.model, call.layer, call.head, call.branch

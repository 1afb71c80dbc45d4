"""Compares the reconstructions on captured calls. Every number is that of a whole call through
`residua.attention`, from a cold start; errors are those of rows that the call has not computed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....api import attention
from ....config import Config
from ....method.sizes import Sizes
from ....receipt import Receipt
from ...capture.captures import CapturedCall
from ..common import Watch, watched
from ..results import Result
from ..subject import Subject

DENSITIES = (0.02, 0.03, 0.05, 0.08, 0.14, 0.22, 0.35)
COMPARED = ("none", "probe", "tail", "anchored")
DRIFT_RANKS = (0, 8, 32)
SLOTS = (32, 64, 128, 256)

COMPARISON, SAME_COST, INGREDIENTS = "reconstructions", "same cost", "ingredients"
SIMPLER = ("none", "probe")  # their density counts exact pairs alone
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Run(Result):
    """One call under one setting; `density` is that of its exact pairs."""

    target: float
    tokens: int
    cost: float  # in all, as in the receipt
    estimate: float | None  # the receipt's error estimate
    chosen: str  # what the head chose, if the reconstruction has a choice
    notes: tuple[str, ...]


class Bench:
    """One captured call under many settings."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._done: dict[Config, tuple[tuple[float, float], Receipt]] = {}

    def compare(self, config: Config, densities: Sequence[float]) -> Iterator[Run]:
        """Every reconstruction at every density; the setting is `reconstruction @ density`. Those that
        are not charged for their routing are measured once more with as many pairs less."""
        for density in densities:
            for reconstruction in COMPARED:
                changed = config.replace(reconstruction=reconstruction, density=density)
                found = self.run(COMPARISON, at(reconstruction, density), changed)
                yield found
                left = density - (found.cost - found.density)
                if reconstruction in SIMPLER and left > 0:
                    changed = changed.replace(density=left)
                    yield self.run(SAME_COST, at(reconstruction, density), changed)

    def take_apart(self, config: Config) -> Iterator[Run]:
        """Anchored reconstruction with one thing changed at a time, at the density of the config."""
        for setting, changed in ingredients(config, self.subject.sizes(config)).items():
            yield self.run(INGREDIENTS, setting, changed)

    def run(self, table: str, setting: str, config: Config) -> Run:
        (mean, p99), receipt = self._measured(config)
        captured = self.subject.captured
        return Run(
            table,
            setting,
            captured.model,
            captured.name,
            mean,
            p99,
            receipt.density,
            config.density,
            captured.tokens,
            receipt.cost,
            receipt.error,
            ", ".join(name for name, heads in receipt.chosen.items() if heads),
            receipt.notes,
        )

    def _measured(self, config: Config) -> tuple[tuple[float, float], Receipt]:
        key = as_resolved(config, self.subject.sizes(config))
        if key not in self._done:
            call, captured = self.subject.call, self.subject.captured
            out, receipt = attention(
                call.q,
                call.k,
                call.v,
                config,
                scale=captured.scale,
                pinned_keys=captured.text,
                exact_queries=captured.text_queries,
                return_receipt=True,
            )
            self._done[key] = self.subject.errors_at(out, probed(receipt)), receipt
        return self._done[key]


def probed(receipt: Receipt) -> Tensor:
    """The rows that a call computed exactly as probes.  # [M] int64"""
    rows = receipt.probe_rows
    return torch.empty(0, dtype=torch.long) if rows is None else rows.flatten()


def at(reconstruction: str, density: float) -> str:
    return f"{reconstruction} @ {density:g}"


def as_resolved(config: Config, sizes: Sizes) -> Config:
    """The config with the sizes that the call really uses: two configs with the same sizes are the same
    call."""
    return config.replace(
        query_groups=sizes.query_groups,
        kv_groups=sizes.kv_groups,
        probes=sizes.probes,
        summary_slots=sizes.single_slots + sizes.merged_slots,
        drift_rank=sizes.drift_rank,
    )


def ingredients(config: Config, sizes: Sizes) -> dict[str, Config]:
    base = config.replace(reconstruction="anchored")
    query, kv = sizes.query_groups, sizes.kv_groups
    made = {AS_IT_IS: base}
    for rank in DRIFT_RANKS:
        made[f"drift rank {rank}" if rank else "without drift"] = base.replace(drift_rank=rank)
    made |= {f"{slots} slots": base.replace(summary_slots=slots) for slots in SLOTS}
    return made | {
        "half the query groups": base.replace(query_groups=max(1, query // 2)),
        "twice the query groups": base.replace(query_groups=2 * query),
        "half the K/V groups": base.replace(kv_groups=max(1, kv // 2)),
        "twice the K/V groups": base.replace(kv_groups=2 * kv),
    }


@torch.no_grad()
def measure(
    calls: Sequence[CapturedCall], config: Config, quick: bool = False, watch: Watch | None = None
) -> list[Run]:
    """Every setting on every call, one call in memory at a time."""
    results: list[Run] = []
    for captured in watched(calls, watch):
        bench = Bench(Subject(captured, config))
        results += bench.compare(config, DENSITIES)
        if not quick:
            results += bench.take_apart(config)
    return results

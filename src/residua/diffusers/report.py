"""What an accelerated pipeline did, as data, as JSON and as a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .attach import Attachment
from .layer import Layer


@dataclass(frozen=True)
class LayerReport:
    """One self-attention layer, or the sum of many. `density` is that of the sparse calls, pairs over
    possible pairs; `cost` is their share of dense attention with everything beside the pairs (probes, router,
    tail); `density_with_dense` counts the dense calls too. `error` is the mean of the probes' estimates."""

    name: str
    sparse: int
    warm: int
    dense: dict[str, int]  # reason -> calls
    density: float | None
    cost: float | None
    density_with_dense: float | None
    error: float | None
    pairs: dict[str, int]
    beside: dict[str, float]  # work beside the pairs, in pair equivalents
    chosen: dict[str, int]  # what the heads chose -> how many, over heads and calls
    dense_heads: int  # of these, how many ran dense because max_error asked for it
    dense_pairs: int
    flops: int  # of the sparse calls, routing included
    stages: dict[str, float]  # seconds of the sparse calls; empty unless profiled
    sparse_seconds: float
    dense_seconds: float
    shapes: list[dict[str, Any]]  # q [B, Nq, H, D], k [B, Nk, Hkv, D], calls
    backends: dict[str, int]
    notes: dict[str, int]

    @property
    def dense_calls(self) -> int:
        return sum(self.dense.values())

    @property
    def seconds(self) -> float:
        return self.sparse_seconds + self.dense_seconds


@dataclass(frozen=True)
class TransformerReport:
    name: str
    model: str
    family: str
    preset: str
    settings: dict[str, Any]
    runs: int
    grids: list[tuple[int, int, int]]
    layers: tuple[LayerReport, ...]
    total: LayerReport


@dataclass(frozen=True)
class Report:
    """`print(report)` shows the table; `to_json()` carries everything."""

    transformers: tuple[TransformerReport, ...]
    total: LayerReport
    clock: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __rich__(self) -> Any:
        from .table import report_table

        return report_table(self)

    def __str__(self) -> str:
        from .table import render

        return render(self)


def make_report(attachments: Iterable[Attachment], notes: Iterable[str] = ()) -> Report:
    attachments = list(attachments)
    transformers = tuple(_transformer(attachment) for attachment in attachments)
    layers = [layer for attachment in attachments for layer in attachment.layers]
    return Report(transformers, _sum("all", layers), _clock(layers), tuple(notes))


def _transformer(attachment: Attachment) -> TransformerReport:
    return TransformerReport(
        name=attachment.name,
        model=type(attachment.model).__name__,
        family=attachment.family.name,
        preset=attachment.family.preset.source,
        settings=attachment.site.settings.to_dict(),
        runs=attachment.tracker.runs,
        grids=sorted(attachment.site.grids),
        layers=tuple(_sum(layer.name, [layer]) for layer in attachment.layers),
        total=_sum(attachment.name, attachment.layers),
    )


def _sum(name: str, layers: list[Layer]) -> LayerReport:
    logs = [layer.log for layer in layers]
    for log in logs:
        log.settle()
    pairs = _added(log.pairs for log in logs)
    beside = _added(log.beside for log in logs)
    chosen = _added(log.chosen for log in logs)
    errors = [error for log in logs for error in log.errors]
    dense_pairs = sum(log.dense_pairs for log in logs)
    shapes = _added(log.shapes for log in logs)
    possible = pairs["possible"]
    return LayerReport(
        name=name,
        sparse=sum(log.sparse for log in logs),
        warm=sum(log.warm for log in logs),
        dense=dict(_added(log.dense for log in logs)),
        density=pairs["total"] / possible if possible else None,
        cost=(pairs["total"] + sum(beside.values())) / possible if possible else None,
        density_with_dense=(
            (pairs["total"] + dense_pairs) / (possible + dense_pairs) if possible + dense_pairs else None
        ),
        error=sum(errors) / len(errors) if errors else None,
        pairs=dict(pairs),
        beside=dict(beside),
        chosen=dict(chosen),
        dense_heads=chosen["dense"],
        dense_pairs=dense_pairs,
        flops=sum(log.flops for log in logs),
        stages=dict(_added(log.stages for log in logs)),
        sparse_seconds=sum(log.sparse_clock.seconds() for log in logs),
        dense_seconds=sum(log.dense_clock.seconds() for log in logs),
        shapes=[{"q": list(q), "k": list(k), "calls": calls} for (q, k), calls in sorted(shapes.items())],
        backends=dict(_added(log.backends for log in logs)),
        notes=dict(_added(log.notes for log in logs)),
    )


def _added(counters: Iterable[Counter[Any]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _clock(layers: list[Layer]) -> str:
    devices = {layer.log.device for layer in layers if layer.log.device}
    if "cuda" in devices:
        return "CUDA events around each attention call"
    return "wall time of each attention call" if devices <= {"cpu"} else "host time, device not synchronised"

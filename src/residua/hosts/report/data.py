"""What the accelerated transformers of a host did: as data, as JSON, as a table, as a page."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import InputError
from ...util import json_text
from ...util.files import write_text_whole
from ..host import HostAttention
from ..log import Tally
from ..watch import nothing_sparse
from .page import report_fragment, report_page
from .table import headline, render, report_table

Per = Literal["layer", "step", "branch"]
PER = ("layer", "step", "branch")
# What a row and a tally have in common: added up as it is.
NUMBERS = ("sparse", "warm", "reused", "dense_pairs", "flops")
COUNTERS = ("dense", "pairs", "beside", "chosen", "stages", "backends", "notes")


@dataclass(frozen=True)
class ReportRow:
    """The calls of one layer, step or branch, or the sum of many.

    `density` is that of the sparse calls, evaluated over possible pairs; `cost` is their share of dense
    attention including all other work (probes, router, summary); `density_with_dense` counts the dense calls
    too. `error` is the mean of the estimates from probe rows."""

    name: str
    sparse: int
    warm: int
    reused: float  # warm calls that kept their groups, weighted by the share of their heads
    dense: dict[str, int]  # reason -> calls
    density: float | None
    cost: float | None
    density_with_dense: float | None
    error: float | None
    pairs: dict[str, int]
    beside: dict[str, float]  # work other than pairs, in pair equivalents
    chosen: dict[str, int]  # choices of the heads -> how many, over heads and calls
    dense_heads: int  # heads that ran dense because of max_error
    dense_pairs: int
    flops: int  # of the sparse calls, routing included
    stages: dict[str, float]  # seconds of the sparse calls; empty unless stages were timed
    sparse_seconds: float
    dense_seconds: float
    shapes: list[dict[str, Any]]  # q [B, H, Nq, D], k [B, Hkv, Nk, D], calls
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
    """One transformer: its settings, and its calls by layer, by step and by branch."""

    name: str
    model: str
    family: str
    preset: str
    settings: dict[str, Any]
    runs: int
    grids: list[tuple[int, int, int]]
    layers: tuple[ReportRow, ...]
    steps: tuple[ReportRow, ...]
    branches: tuple[ReportRow, ...]
    total: ReportRow


@dataclass(frozen=True)
class TimeSaved:
    """What the sparse calls saved, compared with dense calls of the same shape that were timed in the same
    runs."""

    compared_with: int  # dense calls
    dense_seconds: float  # what the sparse calls would have taken
    sparse_seconds: float  # what they took

    @property
    def seconds(self) -> float:
        return self.dense_seconds - self.sparse_seconds

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.sparse_seconds


@dataclass(frozen=True, repr=False)
class Report:
    """`print(report)` shows a headline and a table, a notebook shows HTML, `to_json()` contains everything,
    `save("report.html")` writes a page."""

    transformers: tuple[TransformerReport, ...]
    total: ReportRow
    timed_by: str
    saving: TimeSaved | None = None
    why_dense: str = ""  # if nothing ran sparse: the reason with the number that decided
    memory: dict[str, int] = field(default_factory=dict)  # bytes
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    per: Per = "layer"
    full: bool = False

    @property
    def headline(self) -> str:
        """The most important facts in one or two sentences."""
        return headline(self)

    def view(self, per: Per = "layer", full: bool = False) -> Report:
        """The same report with other rows.

        Args:
            per: "layer", "step" or "branch".
            full: Whether every row is shown, or the 8 layers with the largest error.

        Returns:
            A report.
        """
        if per not in PER:
            raise InputError(f"per={per!r}: wanted one of {', '.join(map(repr, PER))}")
        return replace(self, per=per, full=full)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "headline": self.headline}

    def to_json(self, indent: int | None = 2) -> str:
        """Everything as JSON.

        Args:
            indent: Spaces per level; None: one line.

        Returns:
            The text of `to_dict`.
        """
        return json_text.dumps(self.to_dict(), indent=indent)

    def save(self, path: str | Path) -> Path:
        """Writes the report, whole or not at all.

        Args:
            path: Ends in `.html` (a page that needs no other file), `.json` (everything) or `.txt` (the
                table).

        Returns:
            The path that was written.
        """
        path = Path(path)
        writers: dict[str, Callable[[], str]] = {
            ".html": lambda: report_page(self),
            ".json": self.to_json,
            ".txt": lambda: f"{self}\n",
        }
        if path.suffix not in writers:
            raise InputError(f"{path}: wanted a name that ends in {', '.join(writers)}")
        write_text_whole(path, writers[path.suffix]())
        return path

    def __rich__(self) -> Any:
        return report_table(self)

    def _repr_html_(self) -> str:
        return report_fragment(self)

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__  # so that an interactive session shows the table


def make_report(hosts: Sequence[HostAttention], notes: Iterable[str] = ()) -> Report:
    """Adds up what the hosts did since they were made or cleared. On CUDA this waits for the device.

    Args:
        hosts: One per transformer.
        notes: Sentences to add at the end of the report.

    Returns:
        One report for all of them.
    """
    for host in hosts:
        host.read()
    tallies = [tally for host in hosts for tally in host.log.tallies.values()]
    dense = _added(host.dense for host in hosts)
    return Report(
        transformers=tuple(_transformer(host) for host in hosts),
        total=_sum("all", tallies),
        timed_by=_timed_by({device for host in hosts for device in host.log.devices}),
        saving=_saving(tallies),
        why_dense=nothing_sparse(dense) if dense and not any(tally.sparse for tally in tallies) else "",
        memory=_memory(hosts),
        warnings=tuple(dict.fromkeys(line for host in hosts for line in host.warnings)),
        notes=tuple(notes),
    )


def _transformer(host: HostAttention) -> TransformerReport:
    return TransformerReport(
        name=host.name,
        model=host.model,
        family=host.family,
        preset=host.preset,
        settings=host.settings_dict(),
        runs=host.runs,
        grids=sorted(host.grids),
        layers=_rows(host, "layer", dict(sorted(host.log.names.items()))),
        steps=_rows(host, "step", {step: f"step {step}" for step in sorted({key.step for key in host.log.tallies})}),
        branches=_rows(host, "branch", {key.branch: key.branch or "the only branch" for key in host.log.tallies}),
        total=_sum(host.name, host.log.tallies.values()),
    )


def _rows(host: HostAttention, per: Per, names: Mapping[Any, str]) -> tuple[ReportRow, ...]:
    """One row for each layer, step or branch that has a name here."""
    found: dict[Any, list[Tally]] = {value: [] for value in names}
    for key, tally in host.log.tallies.items():
        found[getattr(key, per)].append(tally)
    return tuple(_sum(names[value], tallies) for value, tallies in found.items())


def _sum(name: str, tallies: Iterable[Tally]) -> ReportRow:
    tallies = list(tallies)
    numbers: dict[str, Any] = {field: sum(getattr(tally, field) for tally in tallies) for field in NUMBERS}
    counts: dict[str, Any] = {field: dict(_added(getattr(tally, field) for tally in tallies)) for field in COUNTERS}
    errors = [error for tally in tallies for error in tally.errors]
    shapes = _added(tally.shapes for tally in tallies)
    total, possible = (counts["pairs"].get(part, 0) for part in ("total", "possible"))
    dense_pairs = numbers["dense_pairs"]
    return ReportRow(
        name=name,
        density=total / possible if possible else None,
        cost=(total + sum(counts["beside"].values())) / possible if possible else None,
        density_with_dense=(total + dense_pairs) / (possible + dense_pairs) if possible + dense_pairs else None,
        error=sum(errors) / len(errors) if errors else None,
        dense_heads=counts["chosen"].get("dense", 0),
        sparse_seconds=sum(tally.sparse_timer.seconds() for tally in tallies),
        dense_seconds=sum(tally.dense_timer.seconds() for tally in tallies),
        shapes=[{"q": list(q), "k": list(k), "calls": calls} for (q, k), calls in sorted(shapes.items())],
        **numbers,
        **counts,
    )


def _added(counters: Iterable[Counter[Any]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _saving(tallies: Sequence[Tally]) -> TimeSaved | None:
    """Compares with dense calls that have the tokens of the sparse calls; None if there are none."""
    sparse = [tally for tally in tallies if tally.sparse]
    lengths = {_lengths(tally) for tally in sparse}
    dense = [tally for tally in tallies if not tally.sparse and tally.dense and _lengths(tally) in lengths]
    seconds = sum(tally.sparse_timer.seconds() for tally in sparse)
    if not dense or seconds <= 0.0:
        return None
    # The median, because first calls may also load kernels.
    per_pair = statistics.median(tally.dense_timer.seconds() / tally.dense_pairs for tally in dense)
    pairs = sum(tally.sparse_pairs for tally in sparse)
    return TimeSaved(sum(sum(tally.dense.values()) for tally in dense), per_pair * pairs, seconds)


def _lengths(tally: Tally) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((q[2], k[2]) for q, k in tally.shapes))


def _memory(hosts: Iterable[HostAttention]) -> dict[str, int]:
    hosts = list(hosts)
    memory = {"carried between steps": sum(host.state_bytes for host in hosts)}
    if any("cuda" in host.log.devices for host in hosts):
        memory["peak of the CUDA device"] = torch.cuda.max_memory_allocated()
    return memory


def _timed_by(devices: set[str]) -> str:
    if "cuda" in devices:
        return "CUDA events around each attention call"
    return "wall time of each attention call" if devices <= {"cpu"} else "host time, device not synchronised"

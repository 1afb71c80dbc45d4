"""Many clips, then averages: every prompt dense, then with every setting, and a row of means for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from ...hosts import Settings
from ..metrics.physics import PhysicsRow, mean_dense_physics, mean_physics
from ..metrics.video_quality import METRICS, Lpips
from ..reports.table import Table, number
from .compare import Watch, compare_with, dense_baseline
from .comparison import Baseline, Comparison
from .flops import flops_unit
from .noise_floor import NAME as DENSE_AGAIN
from .run import Request

DENSE = "dense"
# Titles of the figures in tables, and how they are printed. FLOPs are titled by their unit.
FIGURES = {
    "psnr": ("PSNR, dB", "{:.2f}"),
    "ssim": ("SSIM", "{:.4f}"),
    "gmsd": ("GMSD", "{:.4f}"),
    "lpips": ("LPIPS", "{:.4f}"),
    "density": ("density", "{:.1%}"),
    "cost": ("cost", "{:.1%}"),
    "error": ("estimated error", "{:.4f}"),
    "pflops": ("", "{:.4g}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "cpu_speedup": ("in CPU time", "{:.2f}x"),
    "seconds": ("seconds", "{:.1f}"),
}
SCORES = {"imaging_quality": "ImgQual", "subject_consistency": "SubCons", "pbench": "PBench"}


@dataclass(frozen=True)
class MeanRow:
    """One way to generate, averaged over the prompts; None: not measured for all of them."""

    name: str
    settings: Settings | None = None  # None: dense
    density: float | None = None
    cost: float | None = None  # of the sparse calls, as a share of dense attention
    psnr: float | None = None
    ssim: float | None = None
    gmsd: float | None = None
    lpips: float | None = None
    error: float | None = None  # of attention, as estimated by the method itself
    pflops: float | None = None
    speedup: float | None = None
    cpu_speedup: float | None = None  # in processor time, which other work on the machine hardly distorts
    seconds: float | None = None
    waiting: float | None = None  # share of the time in which other work had the core
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)  # lowest and highest value of the prompts
    scores: dict[str, float] = field(default_factory=dict)  # VBench's scores, and PBench's
    parts: dict[str, float] = field(default_factory=dict)  # seconds by part; empty unless stages were timed
    physics: PhysicsRow | None = None  # None: not the model in the box

    def figures(self) -> dict[str, Any]:
        """Everything that was measured, as plain values."""
        values = asdict(self)
        del values["name"], values["settings"]
        return values


@dataclass(frozen=True)
class ClipSet:
    """Requests of one pipeline with their dense clips, which sparse ones are compared with."""

    pipe: Any
    model: str
    requests: Sequence[Request]
    baselines: Sequence[Baseline]
    lpips: Lpips | str
    watch: Watch

    @classmethod
    def generate(
        cls,
        pipe: Any,
        model: str,
        requests: Sequence[Request],
        first: Settings,
        lpips: Lpips | str,
        watch: Watch,
        *,
        noise_floor: bool,
        split: bool = False,
    ) -> ClipSet:
        """The dense clips.

        Args:
            pipe: The pipeline, not accelerated.
            model: Its name.
            requests: What to generate, one per prompt.
            first: The settings of the warm-up.
            lpips: A network, or the reason why there is none.
            watch: Called with the name of each run.
            noise_floor: Whether dense runs twice, to measure how far two dense runs are apart.
            split: Whether the share of attention in the time of a dense step is measured.
        """
        baselines = [
            dense_baseline(pipe, request, first, watch, split=split, noise_floor=noise_floor, lpips=lpips)
            for request in requests
        ]
        return cls(pipe, model, requests, baselines, lpips, watch)

    def compare(self, name: str, settings: Settings, time_stages: bool = False) -> list[Comparison]:
        """Every request with these settings, against its dense clip."""
        return [
            compare_with(
                dense,
                self.pipe,
                self.model,
                request,
                settings,
                lpips=self.lpips,
                progress=self.watch(name),
                time_stages=time_stages,
            )
            for request, dense in zip(self.requests, self.baselines, strict=True)
        ]

    def rows_so_far(
        self, todo: Sequence[tuple[str, Settings]], time_stages: bool = False
    ) -> Iterator[tuple[list[MeanRow], list[Comparison]]]:
        """Yields all rows and the last comparisons after each setting, so that a run that is interrupted keeps its
        results. Dense comes first, then the second dense run if there was one."""
        rows: list[MeanRow] = []
        for name, settings in todo:
            found = self.compare(name, settings, time_stages)
            if not rows:
                rows += self._dense_rows(found)
            rows.append(sparse_row(name, settings, found))
            yield rows, found

    def _dense_rows(self, found: Sequence[Comparison]) -> list[MeanRow]:
        """Dense attention has no distance from itself and no error."""
        seconds, pflops = (
            fmean(dense.timed.median for dense in self.baselines),
            mean([one.pflops(dense=True) for one in found]),
        )
        attention = mean([dense.attention_share for dense in self.baselines])
        parts = {}
        if attention is not None:
            parts = {"rest of the model": (1 - attention) * seconds, "dense": attention * seconds}
        dense = MeanRow(
            DENSE,
            density=1.0,
            cost=1.0,
            pflops=pflops,
            speedup=1.0,
            cpu_speedup=1.0,
            seconds=seconds,
            parts=parts,
            physics=mean_dense_physics([one.physics for one in found]),
        )
        noise_floors = [one.noise_floor for one in self.baselines if one.noise_floor is not None]
        if not noise_floors:
            return [dense]
        again: dict[str, Any] = {name: mean([getattr(one, name) for one in noise_floors]) for name in METRICS}
        return [dense, MeanRow(DENSE_AGAIN, density=1.0, cost=1.0, pflops=pflops, **again)]


def sparse_row(name: str, settings: Settings, found: Sequence[Comparison]) -> MeanRow:
    """The means of one setting over the prompts."""
    figures = {
        **{metric: [getattr(one.quality, metric) for one in found] for metric in METRICS},
        "density": [one.density for one in found],
        "cost": [one.cost for one in found],
        "error": [one.report.total.error for one in found],
        "pflops": [one.pflops(dense=False) for one in found],
        "speedup": [one.speedup for one in found],
        "cpu_speedup": [one.cpu_speedup for one in found],
        "seconds": [one.sparse.median for one in found],
        "waiting": [one.waiting for one in found],
    }
    means: dict[str, Any] = {figure: mean(values) for figure, values in figures.items()}
    spread = {figure: (min(values), max(values)) for figure, values in figures.items() if means[figure] is not None}
    physics = mean_physics([one.physics for one in found])
    return MeanRow(name, settings, **means, spread=spread, parts=_parts(found), physics=physics)


def table(
    title: str,
    first: str,
    names: Sequence[str],
    rows: Sequence[MeanRow],
    labels: Mapping[str, Sequence[str]] | None = None,
    emphasis: str | None = None,
) -> Table:
    """Everything that was measured, without empty columns.

    Args:
        title: Of the table.
        first: Title of the names.
        names: A name for each row.
        rows: What was measured.
        labels: Columns before the figures, by title.
        emphasis: The name of our row.
    """
    unit, factor = flops_unit(row.pflops for row in rows)
    columns: dict[str, list[str]] = {name: list(cells) for name, cells in (labels or {}).items()}
    for figure, (heading, form) in FIGURES.items():
        by, values = factor if figure == "pflops" else 1, [getattr(row, figure) for row in rows]
        columns[heading or unit] = [number(None if value is None else by * value, form) for value in values]
    for score, heading in SCORES.items():
        columns[heading] = [number(row.scores.get(score), "{:.4f}") for row in rows]
    return Table.filled(title, first, names, columns, emphasis=emphasis)


def mean(values: Sequence[float | None]) -> float | None:
    """Mean over the prompts; None if one is missing, because a mean over other prompts is not comparable."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _parts(found: Sequence[Comparison]) -> dict[str, float]:
    """Mean seconds of each part of a generation; empty if stages were not timed."""
    if not all(one.parts for one in found):
        return {}
    parts: dict[str, float] = {}
    for one in found:
        for name, seconds in one.parts.items():
            parts[name] = parts.get(name, 0.0) + seconds / len(found)
    return parts

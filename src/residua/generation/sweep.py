"""Quality against efficiency over many settings: the paper's end-to-end table, for any pipeline."""

from __future__ import annotations

import io
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import doctor
from ..config import Config
from ..lab.metrics import Lpips
from .comparison import Baseline, Comparison, Sparsity, Watch, against, dense_baseline, machine
from .run import Request

FILES = ("compare.md", "compare.json", "compare.png")
COLUMNS = {
    "partition": "partition", "repair": "repair", "target": "target", "density": "density",
    "psnr": "PSNR, dB", "ssim": "SSIM", "lpips": "LPIPS", "error": "attention error", "pflops": "PFLOPs",
    "speedup": "speed-up", "seconds": "seconds",
}  # fmt: skip
FORMS = {
    "target": "{:.0%}", "density": "{:.1%}", "psnr": "{:.2f}", "ssim": "{:.4f}", "lpips": "{:.4f}",
    "error": "{:.4f}", "pflops": "{:.4g}", "speedup": "{:.2f}x", "seconds": "{:.1f}",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One setting, averaged over the prompts; None was not measured."""

    partition: str
    repair: str
    target: float | None
    density: float | None
    psnr: float | None
    ssim: float | None
    lpips: float | None
    error: float | None
    pflops: float | None
    speedup: float | None
    seconds: float | None


def settings(
    densities: Sequence[float], partitions: Sequence[str], repairs: Sequence[str], base: Sparsity
) -> list[Sparsity]:
    """Every combination, validated before anything runs."""
    return [
        Sparsity(
            Config(density=density, partition=partition, repair=repair),
            dense_steps=base.dense_steps,
            dense_layers=base.dense_layers,
            min_tokens=base.min_tokens,
        )
        for partition, repair, density in itertools.product(partitions, repairs, densities)
    ]


def sweep(
    pipe: Any,
    model: str,
    requests: Sequence[Request],
    todo: Sequence[Sparsity],
    lpips: Lpips | str,
    watch: Watch,
) -> Iterator[tuple[list[Row], int]]:
    """The rows so far and the video tokens, each time a setting is finished; dense comes first."""
    baselines = [dense_baseline(pipe, request, todo[0], watch) for request in requests]
    rows: list[Row] = []
    for sparsity in todo:
        found = [
            against(pipe, model, request, sparsity, dense, lpips=lpips, steps=watch(_name(sparsity)))
            for request, dense in zip(requests, baselines, strict=True)
        ]
        if not rows:
            rows.append(_dense_row(found, baselines))
        rows.append(_row(sparsity, found))
        yield rows, found[0].tokens


def result_files(rows: Sequence[Row], facts: dict[str, Any]) -> dict[str, bytes]:
    content = {
        **facts,
        "rows": [asdict(row) for row in rows],
        "versions": doctor.versions(),
        "machine": machine(),
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    return dict(zip(FILES, (markdown(rows, facts).encode(), text.encode(), plot(rows)), strict=True))


def cells(row: Row, columns: Iterable[str] = COLUMNS) -> list[str]:
    values = asdict(row)
    return [_cell(name, values[name]) for name in columns]


def markdown(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    lines = [
        f"# {facts['model']}: quality against efficiency",
        "",
        f"{facts['tokens']:,} video tokens, {facts['steps'] or 'default'} steps, {len(facts['prompts'])} "
        f"prompt(s), seed {facts['seed']}. PSNR, SSIM and LPIPS against the dense video of the same seed; "
        "speed-up of the whole generation, dense steps included; PFLOPs of the transformer (self-attention "
        "and matrix products).",
        *(f"LPIPS was not measured: {reason}." for reason in [facts["lpips_not_measured"]] if reason),
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|" + "---|" * 2 + "---:|" * (len(COLUMNS) - 2),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        "```",
        facts["command"],
        "```",
    ]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row]) -> bytes:
    """PSNR and speed-up over density, one line per partition and repair."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for axis, (name, title) in zip(panels, (("psnr", "PSNR, dB"), ("speedup", "speed-up")), strict=True):
        for partition, repair in dict.fromkeys((row.partition, row.repair) for row in rows[1:]):
            line = [row for row in rows[1:] if (row.partition, row.repair) == (partition, repair)]
            known = [(row.density, getattr(row, name)) for row in line if row.density and getattr(row, name)]
            axis.plot(*zip(*sorted(known), strict=True) if known else ([], []), marker="o",
                      label=f"{partition}, repair {repair}")  # fmt: skip
        axis.set_xlabel("density of the sparse calls")
        axis.set_title(title, loc="left")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _row(sparsity: Sparsity, found: list[Comparison]) -> Row:
    assert sparsity.config is not None
    return Row(
        partition=sparsity.config.partition,
        repair=sparsity.config.repair,
        target=sparsity.config.density,
        density=_mean([one.density for one in found]),
        psnr=_mean([one.quality.psnr for one in found]),
        ssim=_mean([one.quality.ssim for one in found]),
        lpips=_mean([one.quality.lpips for one in found]),
        error=_mean([one.report.total.error for one in found]),
        pflops=_mean([one.pflops(dense=False) for one in found]),
        speedup=_mean([one.speedup for one in found]),
        seconds=_mean([one.sparse.median for one in found]),
    )


def _dense_row(found: list[Comparison], baselines: list[Baseline]) -> Row:
    pflops = _mean([one.pflops(dense=True) for one in found])
    seconds = _mean([dense.timed.median for dense in baselines])
    return Row("dense", "-", None, 1.0, None, None, None, None, pflops, 1.0, seconds)


def _mean(values: list[float | None]) -> float | None:
    """None if one is missing: a mean over other prompts would not be comparable."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _name(sparsity: Sparsity) -> str:
    assert sparsity.config is not None
    return f"{sparsity.config.density:g} {sparsity.config.partition} {sparsity.config.repair}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return FORMS[name].format(value) if name in FORMS else str(value)

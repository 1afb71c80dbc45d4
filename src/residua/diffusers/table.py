"""A report as a rich table."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import LayerReport, Report, TransformerReport

COLUMNS = ("layer", "density", "sparse", "warm", "dense", "why dense", "error", "sparse s", "dense s")
WIDTH = 120


def report_table(report: Report) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_transformer_table(transformer) for transformer in report.transformers]
    if len(report.transformers) > 1:
        parts.append(_table("all transformers", [report.total]))
    parts.append(Text(_footer(report)))
    return Group(*parts)


def render(report: Report) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    console.print(report_table(report))
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def _transformer_table(transformer: TransformerReport) -> Any:
    target = transformer.settings["config"]["density"]
    grids = ", ".join("x".join(map(str, grid)) for grid in transformer.grids) or "none yet"
    title = (
        f"{transformer.name} ({transformer.family}): target density {target:g}, runs {transformer.runs}, "
        f"grid {grids}"
    )
    return _table(title, [*transformer.layers, transformer.total])


def _table(title: str, rows: list[LayerReport]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for column in COLUMNS:
        left = column in ("layer", "why dense")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "why dense")
    for number, row in enumerate(rows):
        if number and number == len(rows) - 1:
            table.add_section()
        table.add_row(*(Text(cell) for cell in _cells(row)))
    return table


def _cells(row: LayerReport) -> tuple[str, ...]:
    reasons = ", ".join(f"{reason} {calls}" for reason, calls in row.dense.items())
    return (
        row.name,
        _number(row.density, ".4f"),
        str(row.sparse),
        str(row.warm),
        str(row.dense_calls),
        reasons or "-",
        _number(row.error, ".2e"),
        f"{row.sparse_seconds:.3f}",
        f"{row.dense_seconds:.3f}",
    )


def _footer(report: Report) -> str:
    total = report.total
    lines = [
        f"density: evaluated pairs / possible pairs of the sparse calls; with the dense calls "
        f"{_number(total.density_with_dense, '.4f')}",
        f"error: mean relative row error, estimated from the probe rows; time: {report.clock}",
        *([_stages(total.stages)] if total.stages else []),
        *(f"{note} ({calls} calls)" for note, calls in total.notes.items()),
        *report.notes,
    ]
    return "\n".join(lines)


def _stages(stages: dict[str, float]) -> str:
    return "seconds of the sparse calls by stage: " + ", ".join(f"{k} {v:.3f}" for k, v in stages.items())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

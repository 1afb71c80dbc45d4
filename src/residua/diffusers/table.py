"""A report as a rich table of 80 columns."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import LayerReport, Report, TransformerReport

LEFT = {"layer": 14, "dense calls, why": 16}  # columns of text that may wrap, and the least they need
COLUMNS = ("layer", "cost", "density", "error", "calls", "seconds", "dense calls, why")
WIDTH = 80


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
    grids = ", ".join("x".join(map(str, grid)) for grid in transformer.grids) or "none yet"
    title = (
        f"{transformer.name} ({transformer.family}): {_target(transformer.settings)}, "
        f"runs {transformer.runs}, grid {grids}"
    )
    return _table(title, [*transformer.layers, transformer.total])


def _target(settings: dict[str, Any]) -> str:
    """What was asked for: a density, or an error bound under a density."""
    config, name = settings["config"], settings["quality"]
    if config["max_error"] is None:
        return f"target density {config['density']:g}"
    bound = f"max_error {config['max_error']:g}, density at most {config['density']:g}"
    return bound if name is None else f"quality {name} ({bound})"


def _table(title: str, rows: list[LayerReport]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in COLUMNS:
        if column in LEFT:
            table.add_column(column, overflow="fold", min_width=LEFT[column])
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        if number and number == len(rows) - 1:
            table.add_section()
        table.add_row(*(Text(cell) for cell in _cells(row)))
    return table


def _cells(row: LayerReport) -> tuple[str, ...]:
    reasons = [f"{reason} {calls}" for reason, calls in row.dense.items()]
    if row.dense_heads:
        reasons.append(f"max_error {row.dense_heads} heads")
    return (
        row.name,
        _number(row.cost, ".4f"),
        _number(row.density, ".4f"),
        _number(row.error, ".1e"),
        str(row.sparse),
        f"{row.seconds:.2f}",
        "\n".join(reasons) or "-",
    )


def _footer(report: Report) -> str:
    total = report.total
    lines = [
        "cost: share of dense attention in the sparse calls, with probes, router and tail",
        "density: evaluated pairs / possible pairs of the sparse calls; with the dense",
        f"calls {_number(total.density_with_dense, '.4f')}",
        "error: mean relative row error, estimated from the probe rows",
        f"calls: {total.sparse} sparse ({total.warm} warm), {total.sparse_seconds:.2f} s; "
        f"{total.dense_calls} dense, {total.dense_seconds:.2f} s",
        f"seconds: {report.clock}",
        *([_heads(total)] if total.chosen else []),
        *([_stages(total.stages)] if total.stages else []),
        *(f"{note} ({calls} calls)" for note, calls in total.notes.items()),
        *report.notes,
    ]
    return "\n".join(lines)


def _heads(total: LayerReport) -> str:
    told = {"dense": "dense because of max_error"}
    chosen = [f"{told.get(choice, choice)} {heads}" for choice, heads in total.chosen.items() if heads]
    return f"heads over all sparse calls: {', '.join(chosen)}"


def _stages(stages: dict[str, float]) -> str:
    return "seconds of the sparse calls by stage: " + ", ".join(f"{k} {v:.3f}" for k, v in stages.items())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

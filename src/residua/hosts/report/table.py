"""A report as text of 80 columns: a headline, a table, and what the columns mean."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import Report, ReportRow, TransformerReport

LEFT = {"layer": 14, "step": 8, "branch": 10, "dense calls, why": 16}  # minimum widths of columns that wrap
COLUMNS = ("cost", "density", "error", "calls", "seconds", "dense calls, why")
WIDTH = 80
WORST = 8  # rows of the short form


def headline(report: Report) -> str:
    """Time saved, share of sparse calls, estimated error and backend; or that nothing ran sparse."""
    total = report.total
    if report.why_dense:
        return sentence(report.why_dense)
    if not total.sparse:
        return "No attention call yet."
    calls = total.sparse + total.dense_calls
    parts = [
        f"{total.sparse / calls:.0%} of {calls:,} calls sparse at {_number(total.density, '.1%')} of the pairs",
        _error(report),
        f"backend {', '.join(total.backends) or 'none'}",
    ]
    # What is known comes first.
    parts.insert(len(parts) if report.saving is None else 0, _saved(report))
    return sentence("; ".join(parts))


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _saved(report: Report) -> str:
    if report.saving is None:
        return "time saved unknown: no dense call of this size was timed"
    saving = report.saving
    others = f"{saving.compared_with} dense calls of the same size"
    if saving.seconds < 0:
        return f"{-saving.seconds:.2f} s LOST: sparse calls took {1 / saving.speedup:.2f}x the time of {others}"
    share = saving.seconds / (saving.dense_seconds + report.total.dense_seconds)
    return (
        f"{saving.seconds:.2f} s of attention saved ({share:.0%}): sparse calls ran {saving.speedup:.2f}x as "
        f"fast as {others}"
    )


def _error(report: Report) -> str:
    if report.total.error is None:
        return "error not estimated (no probes)"
    measured = [row for item in report.transformers for row in item.layers if row.error is not None]
    worst = max(measured, key=lambda row: row.error or 0.0)
    return f"estimated error {report.total.error:.2g}, worst layer {worst.error:.2g} ({worst.name})"


def rows_shown(report: Report, transformer: TransformerReport) -> tuple[list[ReportRow], int]:
    """The rows to show for one transformer, and how many measured ones are left out.

    Rows without a call are not shown. The short form has the layers with the largest error, in their order.
    """
    rows = {"layer": transformer.layers, "step": transformer.steps, "branch": transformer.branches}[report.per]
    seen = [row for row in rows if row.sparse or row.dense]
    if report.full or report.per != "layer" or len(seen) <= WORST:
        return seen, 0
    worst = sorted(seen, key=lambda row: -1.0 if row.error is None else row.error, reverse=True)[:WORST]
    return [row for row in seen if row in worst], len(seen) - len(worst)


def title(transformer: TransformerReport) -> str:
    grids = ", ".join("x".join(map(str, grid)) for grid in transformer.grids) or "none yet"
    family = f" ({transformer.family})" if transformer.family else ""
    return f"{transformer.name}{family}: {_target(transformer.settings)}, runs {transformer.runs}, grid {grids}"


def cells(row: ReportRow) -> tuple[str, ...]:
    """The cells of a row in the order of `COLUMNS`, its name first."""
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


def footer(report: Report) -> list[str]:
    """What the columns mean, and notes that belong to no row."""
    total = report.total
    stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in total.stages.items())
    if not total.sparse:
        lines = [f"calls: {total.dense_calls} dense, {total.dense_seconds:.2f} s"] if total.dense_calls else []
        return [*lines, *report.notes]
    return [
        "cost: share of dense attention in the sparse calls, with probes, router and summary",
        "density: evaluated pairs / possible pairs of the sparse calls; with the dense "
        f"calls {_number(total.density_with_dense, '.4f')}",
        "error: mean relative row error, estimated from the probe rows",
        f"calls: {total.sparse} sparse ({total.warm} warm, of which {total.reused:.0f} kept their groups), "
        f"{total.sparse_seconds:.2f} s; "
        f"{total.dense_calls} dense, {total.dense_seconds:.2f} s",
        f"seconds: {report.timed_by}",
        *([_heads(total)] if total.chosen else []),
        *([f"seconds of the sparse calls by stage: {stages}"] if stages else []),
        *(f"memory {name}: {_bytes(size)}" for name, size in report.memory.items() if size),
        *(f"{note} ({calls} {'call' if calls == 1 else 'calls'})" for note, calls in total.notes.items()),
        *report.notes,
    ]


def other_warnings(report: Report) -> list[str]:
    """Warnings that are not in the headline already."""
    return [line for line in report.warnings if not (report.why_dense and line.startswith("nothing ran"))]


def report_table(report: Report) -> Any:
    """The report as a rich table."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(_wrapped(headline(report)), style="bold")]
    parts += [Text(_wrapped(f"warning: {line}")) for line in other_warnings(report)]
    parts.append(Text(""))
    for transformer in report.transformers:
        rows, hidden = rows_shown(report, transformer)
        parts.append(_table(title(transformer), report.per, [*rows, transformer.total]))
        if hidden:
            parts.append(Text(f"and {hidden} layers with a smaller error: report(full=True) shows them"))
    if len(report.transformers) > 1:
        parts.append(_table("all transformers", report.per, [report.total]))
    parts.append(Text("\n".join(_wrapped(line) for line in footer(report))))
    return Group(*parts)


def render(report: Report) -> str:
    """The report as plain text."""
    from rich.console import Console

    # not Jupyter's way even in a notebook: it would show the text at once, and return none
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(report_table(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, break_on_hyphens=False)


def _target(settings: dict[str, Any]) -> str:
    """What was asked for: a density, or an error bound with a density."""
    config, name = settings["config"], settings["quality"]
    if config["max_error"] is None:
        return f"target density {config['density']:g}"
    bound = f"max_error {config['max_error']:g}, density at most {config['density']:g}"
    return bound if name is None else f"quality {name} ({bound})"


def _table(heading: str, per: str, rows: list[ReportRow]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(heading), title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in (per, *COLUMNS):
        if column in LEFT:
            table.add_column(column, overflow="fold", min_width=LEFT[column])
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        if number and number == len(rows) - 1:
            table.add_section()
        table.add_row(*(Text(cell) for cell in cells(row)))
    return table


def _heads(total: ReportRow) -> str:
    labels = {"dense": "dense because of max_error"}
    chosen = [f"{labels.get(choice, choice)} {heads}" for choice, heads in total.chosen.items() if heads]
    return f"heads over all sparse calls: {', '.join(chosen)}"


def _bytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

"""A report as HTML: a fragment for notebooks, and a page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from .table import COLUMNS, cells, footer, headline, other_warnings, rows_shown, title

if TYPE_CHECKING:
    from .data import Report, ReportRow

LEFT = ("layer", "step", "branch", "dense calls, why")

STYLE, PAGE = (files(__package__).joinpath(name).read_text("utf-8") for name in ("report.css", "page.html"))


def report_page(report: Report) -> str:
    """A whole page: readable on a phone, light and dark, with no script and nothing to load."""
    return PAGE.replace("<!-- report -->", report_fragment(report))


def report_fragment(report: Report) -> str:
    """The HTML that a notebook shows for a report. Every text from the model or the host is escaped."""
    parts = [f'<p class="headline">{escape(headline(report))}</p>']
    parts += [f'<p class="warning">{escape(line)}</p>' for line in other_warnings(report)]
    for transformer in report.transformers:
        rows, hidden = rows_shown(report, transformer)
        parts.append(f"<p>{escape(title(transformer))}</p>")
        parts.append(_table(report.per, rows, transformer.total))
        if hidden:
            parts.append(f'<p class="quiet">and {hidden} layers with a smaller error</p>')
    if len(report.transformers) > 1:
        parts += ["<p>all transformers</p>", _table(report.per, [], report.total)]
    parts += [f'<p class="quiet">{escape(line)}</p>' for line in footer(report)]
    return f'<style>\n{STYLE}</style>\n<div class="residua">\n' + "\n".join(parts) + "\n</div>"


def _table(per: str, rows: Iterable[ReportRow], total: ReportRow) -> str:
    columns = (per, *COLUMNS)
    head = "".join(f"<th{_class(column)}>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{_cells(columns, row)}</tr>" for row in rows)
    body += f'<tr class="total">{_cells(columns, total)}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(columns: tuple[str, ...], row: ReportRow) -> str:
    return "".join(
        f"<td{_class(column)}>{escape(cell).replace(chr(10), '<br>')}</td>"
        for column, cell in zip(columns, cells(row), strict=True)
    )


def _class(column: str) -> str:
    return "" if column in LEFT else ' class="number"'

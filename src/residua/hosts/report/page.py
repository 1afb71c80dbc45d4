"""A report as HTML: a fragment for notebooks, and a page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from .table import COLUMNS, cells, footer, headline, other_warnings, rows_shown, title

if TYPE_CHECKING:
    from .data import Report, ReportRow

LEFT = ("layer", "step", "branch", "dense calls, why")

STYLE = """
.residua { --paper: #fbfaf8; --card: #fff; --ink: #1d2230; --quiet: #667085; --line: #e4e2dd; --blue: #3563d9;
  --red: #d2593c; color: var(--ink); background: var(--paper); padding: 16px; border-radius: 12px;
  font: 14px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { .residua { --paper: #14161c; --card: #1d2029; --ink: #e9ebf1;
  --quiet: #98a1b3; --line: #2d3240; --blue: #7d9ff5; --red: #ec8a6d; } }
.residua p { margin: 0 0 10px; overflow-wrap: anywhere; }
.residua .headline { font-size: 17px; font-weight: 600; border-left: 4px solid var(--blue);
  padding-left: 12px; }
.residua .warning { border-left: 4px solid var(--red); padding-left: 12px; }
.residua .scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 4px 12px; margin-bottom: 12px; }
.residua table { border-collapse: collapse; width: 100%; background: none; color: inherit; }
.residua th { text-align: left; color: var(--quiet); font-weight: 600; font-size: 12px; }
.residua th, .residua td { padding: 5px 14px 5px 0; white-space: nowrap; }
.residua td { border-top: 1px solid var(--line); }
.residua .number { text-align: right; font-variant-numeric: tabular-nums; }
.residua tr.total td { font-weight: 600; border-top: 2px solid var(--line); }
.residua .quiet { color: var(--quiet); font-size: 12px; margin: 0; }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Residua report</title>
<style>html, body {{ margin: 0; background: #fbfaf8; }}
@media (prefers-color-scheme: dark) {{ html, body {{ background: #14161c; }} }}
.residua {{ max-width: 1040px; margin: 0 auto; }}</style>
</head>
<body>
{fragment}
</body>
</html>
"""


def report_page(report: Report) -> str:
    """A whole page: readable on a phone, light and dark, with no script and nothing to load."""
    return PAGE.format(fragment=report_fragment(report))


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
    return f'<style>{STYLE}</style>\n<div class="residua">\n' + "\n".join(parts) + "\n</div>"


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

"""Tables of the lab as data, rendered for the terminal, for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Value = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows of a name and values. Text is shown as it is; `emphasis` names the row of the method."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    emphasis: str | None = None

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "note": self.note,
        }

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with bars in cells escaped."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

        ruler = "|---|" + "---:|" * (len(self.columns) - 1)
        bold = [tuple(map(_bold, row)) if row[0] == self.emphasis else row for row in self.rows]
        lines = [f"**{self.title}**", "", line(self.columns), ruler, *map(line, bold)]
        return "\n".join([*lines, "", self.note] if self.note else lines) + "\n"

    def rich(self) -> Any:
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(
            title=escape(self.title), title_justify="left", caption_justify="left", box=None,
            padding=(0, 1, 0, 0), pad_edge=False,
        )  # fmt: skip
        for place, column in enumerate(self.columns):
            if place == 0:
                table.add_column(escape(column), overflow="fold")
            else:
                table.add_column(escape(column), justify="right")
        for row in self.rows:
            style = "bold" if row[0] == self.emphasis else None
            table.add_row(*(escape(cell) for cell in row), style=style)
        table.caption = escape(self.note) if self.note else None
        return table


def pair(mean: float, p99: float) -> str:
    """`mean / p99` as the paper prints them."""
    return f"{mean:.4f} / {p99:.4f}"


def share(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def _bold(cell: str) -> str:
    return f"**{cell}**" if cell else ""

"""Tables as data, rendered for the terminal, for Markdown and for the page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"[-+]?[\d.]")
TITLE_WIDTH = 7  # of a column in the terminal; wider if its cells are


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

    @classmethod
    def filled(
        cls,
        title: str,
        first: str,
        names: Sequence[str],
        columns: Mapping[str, Sequence[str]],
        note: str = "",
        emphasis: str | None = None,
    ) -> Table:
        """A row for each name in the column `first`; the other columns by title, without those that have only "-"."""
        shown = {title: cells for title, cells in columns.items() if any(cell != "-" for cell in cells)}
        rows = tuple((name, *cells) for name, *cells in zip(names, *shown.values(), strict=True))
        return cls(title, (first, *shown), rows, note, emphasis)

    def to_dict(self) -> dict[str, Any]:
        rows = [list(row) for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "note": self.note}

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with bars in cells escaped."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

        ruler = "|---|" + "---:|" * (len(self.columns) - 1)
        bold = [tuple(map(_bold, row)) if row[0] == self.emphasis else row for row in self.rows]
        lines = [f"**{self.title}**", "", line(self.columns), ruler, *map(line, bold)]
        return "\n".join([*lines, "", self.note] if self.note else lines) + "\n"

    def rich(self, leave_out: Collection[str] = (), colours: Mapping[str, str] | None = None) -> Any:
        """The table for a terminal, without the columns that are left out. A word of `colours` at the beginning of a
        cell is shown in its colour."""
        from rich.markup import escape
        from rich.table import Table as RichTable

        def coloured(cell: str) -> str:
            word = next((word for word in colours or {} if cell.startswith(word)), "")
            return f"[{colours[word]}]{word}[/]{escape(cell[len(word) :])}" if colours and word else escape(cell)

        table = RichTable(box=None, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left")
        table.title, table.caption = escape(self.title) or None, escape(self.note) or None
        shown = [place for place, column in enumerate(self.columns) if column not in leave_out]
        for place in shown:
            title = escape(self._narrow_title(place) if place else self.columns[0])
            if place and self._holds_numbers(place):
                table.add_column(title, justify="right", vertical="bottom", no_wrap=True)
            else:
                table.add_column(title, overflow="fold")
        for row in self.rows:
            style = "bold" if row[0] == self.emphasis else None
            table.add_row(*(coloured(row[place]) for place in shown), style=style)
        return table

    def _holds_numbers(self, place: int) -> bool:
        cells = [row[place] for row in self.rows if row[place] not in ("", "-")]
        return 2 * sum(_NUMBER.match(cell) is not None for cell in cells) >= len(cells)

    def _narrow_title(self, place: int) -> str:
        """The title of a column in lines that are no wider than its cells, so that names get the room."""
        width = max(TITLE_WIDTH, *(len(row[place]) for row in self.rows), 0)
        return "\n".join(textwrap.wrap(self.columns[place], width, break_long_words=False))


def number(value: float | None, form: str) -> str:
    """A value in a form such as "{:.1f}"; "-" for None."""
    return "-" if value is None else form.format(value)


def pair(mean: float, p99: float) -> str:
    """`mean / p99` as the paper prints them."""
    return f"{mean:.4f} / {p99:.4f}"


def counted(number: int, what: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def share(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def seconds(value: float) -> str:
    """`1,650 s`, `2.5 s`, `18 ms`."""
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def byte_count(value: float) -> str:
    """`512 B`, `1.5 MiB`, `12.34 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _bold(cell: str) -> str:
    return f"**{cell}**" if cell else ""

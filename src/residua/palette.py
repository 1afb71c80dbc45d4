"""The colours of every chart and page: Residua has one of its own, and so has a contradicted claim."""

from __future__ import annotations

RESIDUA = "#3563d9"  # blue: the method of this project, in charts and as an emphasised row
RESIDUA_ON_DARK = "#7d9ff5"  # the same on dark paper
CONTRADICTED = "#d2593c"  # red: nothing else is
CONFIRMED = "#2c8a6b"  # green: nothing else is
INK, GRID = "#1d2230", "#e4e2dd"  # text and axes; the lines behind them
REFERENCE = "#b9bec9"  # what nobody could run: dense attention, an oracle
# Everything else, in this order; each can be told from its neighbours on light and on dark paper.
OTHERS = ("#8a6bb1", "#d69a2d", "#3aa5a0", "#6b7a90", "#b5577f", "#9c7a4d", "#93a1b5", "#7fa34a")
# Parts of a whole, such as the stages of a call: what is not attention comes first, in greys.
PART_COLOURS = (REFERENCE, "#6b7a90", RESIDUA, *OTHERS[:3], *OTHERS[4:])
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def colours(names: list[str], residua: str | None = None) -> dict[str, str]:
    """A colour for each of some names; `residua` is the one that stands for this project's method."""
    others = [name for name in names if name != residua]
    found = {name: OTHERS[place % len(OTHERS)] for place, name in enumerate(others)}
    return found if residua is None else {**found, residua: RESIDUA}

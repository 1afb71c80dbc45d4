"""The colours of every chart and page. Residua and contradicted claims each have a colour of their own."""

from __future__ import annotations

RESIDUA = "#3563d9"  # blue: the method of this project, in charts and as an emphasised row
RESIDUA_ON_DARK = "#7d9ff5"  # the same on dark paper
CONTRADICTED = "#d2593c"  # red, used for nothing else
CONFIRMED = "#2c8a6b"  # green, used for nothing else
INK, GRID = "#1d2230", "#e4e2dd"  # text and axes; the lines behind them
REFERENCE = "#b9bec9"  # references, which are no rivals: dense attention, an oracle
# Everything else, in this order; neighbours differ clearly on light and on dark backgrounds.
OTHERS = ("#8a6bb1", "#d69a2d", "#3aa5a0", "#6b7a90", "#b5577f", "#9c7a4d", "#93a1b5", "#7fa34a")
# Parts of a whole, such as the stages of a call: what is not attention comes first, in greys.
PART_COLOURS = (REFERENCE, "#6b7a90", RESIDUA, *OTHERS[:3], *OTHERS[4:])
DASHES = ("-", "--", ":", "-.")  # of lines that share a colour
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def colours(names: list[str], *residua: str) -> dict[str, str]:
    """A colour for each of some names; those in `residua` stand for this project's method and share its
    colour."""
    others = [name for name in names if name not in residua]
    found = {name: OTHERS[place % len(OTHERS)] for place, name in enumerate(others)}
    return {name: found.get(name, RESIDUA) for name in names}

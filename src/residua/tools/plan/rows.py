"""Models and machines as data: the rows of a TOML file beside this one."""

from pathlib import Path
from typing import Any

from ...util.toml_text import read_toml

NOT_INHERITED = ("like", "aliases", "paper", "chip")


def read_rows(file: str) -> dict[str, dict[str, Any]]:
    """Every row by name. A row takes what it does not say from the one that it is `like`."""
    rows = read_toml(Path(__file__).with_name(file), "layers = 40")

    def whole(row: dict[str, Any]) -> dict[str, Any]:
        above = whole(rows[row["like"]]) if "like" in row else {}
        return {key: value for key, value in above.items() if key not in NOT_INHERITED} | _with_tuples(row)

    return {name: {key: value for key, value in whole(row).items() if key != "like"} for name, row in rows.items()}


def _with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else _with_tuples(value) if isinstance(value, dict) else value
        for key, value in row.items()
    }

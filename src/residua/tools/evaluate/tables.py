"""Reads tables of a TOML file name by name: a wrong type or an unknown name is refused with a hint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from ...errors import InputError
from ...util.spelling import did_you_mean

KINDS = {
    str: "text in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list [...]",
    dict: "a table",
}


Filled = TypeVar("Filled")


class TomlTable:
    """One table and its place in the file, for messages such as `[generation] steps`."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.where = where
        self._values = dict(values)
        self._asked: list[str] = []

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a name, or the default."""
        self._asked.append(name)
        if name not in self._values:
            return default
        value = self._values[name]
        fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"wanted {KINDS[kind]}")
        return value

    def need(self, name: str, kind: type, example: str) -> Any:
        """The value of a required name."""
        if self.get(name, kind) is None:
            raise InputError(f"{self._place(name)} is missing: write, for example, {example}")
        return self._values[name]

    def table(self, name: str) -> TomlTable:
        """A table inside this one; empty if it is missing."""
        where = f"{self.where}.{name}" if self.where else name
        return TomlTable(self.get(name, dict, {}), where)

    def fill(self, kind: type[Filled], **given: Any) -> Filled:
        """A dataclass whose fields are the names of the table; what is missing keeps its default.

        Args:
            kind: The dataclass.
            **given: Fields that are not in the table.
        """
        hints, values = get_type_hints(kind), dict(given)
        for field in fields(kind):  # type: ignore[arg-type]
            if field.name not in given:
                wanted = next(iter(get_args(hints[field.name])), hints[field.name])  # `int` of `int | None`
                value = self.get(field.name, wanted, field.default)
                values[field.name] = float(value) if wanted is float and value is not None else value
        self.finish()
        return kind(**values)

    def names(self) -> list[str]:
        return list(self._values)

    def finish(self) -> None:
        """Refuses names that were not read: a misspelt name must not be ignored."""
        for name in self._values:
            if name not in self._asked:
                hint = did_you_mean(name, self._asked) or f"; there are: {', '.join(self._asked)}"
                raise InputError(f"{self._place(name)} is not known{hint}")

    def error(self, name: str, wanted: str) -> InputError:
        return InputError(f"{self._place(name)} = {self._values.get(name)!r}: {wanted}")

    def _place(self, name: str) -> str:
        return f"[{self.where}] {name}" if self.where else name

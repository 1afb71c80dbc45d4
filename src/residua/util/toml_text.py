"""TOML files that users give, read with clear errors; and plain values written as TOML."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 1 << 20


def read_toml(path: Path, example: str) -> dict[str, Any]:
    """The content of a TOML file that a user gave; InputError if it cannot be read.

    Args:
        path: The file.
        example: A line that it might hold, for the message.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES} bytes; settings are a few lines")
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_whole_numbers(found)
        return found
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from error
    except (ValueError, RecursionError) as error:  # also broken UTF-8 and numbers of thousands of digits
        raise InputError(f"{path}: not valid TOML ({error}); write lines such as `{example}`") from error


def _check_whole_numbers(value: Any) -> None:
    """Refuses integers of more than 64 bits: TOML has none, but Python's reader accepts them."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"a whole number of {value.bit_length()} bits, at most 64 are allowed")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_whole_numbers(item)


def table_lines(name: str, values: Mapping[str, Any]) -> list[str]:
    """The lines of a table. None values are left out, and a list of dicts has one entry per line.

    Args:
        name: Its name.
        values: Plain values by name.
    """
    lines = ["", f"[{name}]"]
    return lines + [f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)  # `inf` and `nan` are valid TOML
    if isinstance(value, Mapping):
        inside = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(inside) + " }"
    if isinstance(value, (list, tuple)):
        items = [_value(item) for item in value]
        if value and isinstance(value[0], (Mapping, str)):
            return "[\n" + "".join(f"  {item},\n" for item in items) + "]"
        return "[" + ", ".join(items) + "]"
    return _text(str(value))


def _key(name: Any) -> str:
    text = str(name)
    plain = text.isascii() and text.replace("_", "").replace("-", "").isalnum()
    return text if plain else _text(text)


def _text(text: str) -> str:
    """A TOML string: JSON's, except for DEL and for lone surrogates, which no file can hold."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007f")

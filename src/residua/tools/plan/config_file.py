"""A config.json that nobody has checked: finds it, reads it, and gives its values by type."""

import json
from pathlib import Path
from typing import Any

from ...errors import InputError

MAX_BYTES = 1 << 20
MAX_NUMBER = 1 << 20  # larger than any width, count or token number of a real model


def find_config(path: Path) -> Path:
    try:
        if path.is_dir():
            for file in (path / "config.json", path / "transformer" / "config.json"):
                if file.is_file():
                    return file
            raise InputError(f"{path}: no config.json in it; give a transformer's folder or its config.json")
        if not path.is_file():
            raise InputError(f"{path}: not a file; give a transformer's config.json")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)[:200]!r}: cannot be looked up ({error}); give a config.json") from error
    return path


def load_config(file: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise InputError(f"{file}: larger than {MAX_BYTES} bytes; a transformer's config is a few hundred")
        config = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); give a config.json") from error
    except RecursionError as error:
        raise InputError(f"{file}: nested too deeply; a transformer's config is flat") from error
    except InputError:
        raise
    except ValueError as error:  # includes invalid UTF-8 and numbers of thousands of digits
        raise InputError(f"{file}: not valid JSON ({error}); give a transformer's config.json") from error
    if not isinstance(config, dict):
        raise InputError(f"{file}: holds a {type(config).__name__}; wanted one JSON object")
    return config


class ConfigValues:
    """Typed access to a config. A key that is missing or null takes the class's default, with a note."""

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        self.file, self.config = file, config
        self.missing: list[str] = []
        self.notes: list[str] = []

    def _get(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        if value is None:
            self.missing.append(name)
            return default
        return value

    def whole(self, name: str, default: int) -> int:
        return self._check(name, self._get(name, default))

    def ratio(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 64:
            raise InputError(f"{self.file}: {name}={_short(value)}: wanted a number above 0, up to 64")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.file}: {name}={_short(value)}: wanted true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise InputError(f"{self.file}: {name}={_short(value)}: wanted a word")
        return value

    def triple(self, name: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
        value = self._get(name, list(default))
        if not isinstance(value, list) or len(value) != 3:
            raise InputError(f"{self.file}: {name}={_short(value)}: wanted three whole numbers")
        first, second, third = (self._check(name, part) for part in value)
        return first, second, third

    def parts(self, width: int, size: int) -> int:
        """How many parts of that size fit a width: heads, or channels of a head."""
        if width % size:
            raise InputError(f"{self.file}: a width of {width} is no multiple of {size}")
        return width // size

    def _check(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
            raise InputError(f"{self.file}: {name}={_short(value)}: wanted a whole number from 1 to {MAX_NUMBER}")
        return value


def _short(value: Any) -> str:
    """An untrusted value, shortened for a message; the digits of huge integers are not printed."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_NUMBER:
        return "a very large number"
    return repr(value)[:80]

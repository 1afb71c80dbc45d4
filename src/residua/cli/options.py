"""Reading option values that are more than one number, and writing a command down again."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from ..errors import InputError

# Written out here: the modules that know them take seconds to import, and `--help` must not wait for them.
RECONSTRUCTIONS = ("anchored", "tail", "probe", "none")
CONCENTRATIONS = ("broad", "medium", "sparse")


def count_or_share(name: str, text: str | None) -> float | None:
    """'2' is two of them, '0.1' a tenth of all."""
    if text is None:
        return None
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise InputError(f"--{name} {text!r}: wanted a whole number, or a share such as 0.1") from None


def numbers(name: str, text: str) -> list[float]:
    parts = words(name, text)
    try:
        return [float(part) for part in parts]
    except ValueError:
        raise InputError(f"--{name} {text!r}: wanted numbers separated by commas") from None


def words(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(f"--{name} {text!r}: wanted at least one value")
    return parts


def alone(quality: str | None, **others: object) -> None:
    """--quality sets the error bound and the density: refuses what would contradict it."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    if quality is not None and given:
        raise InputError(
            f"--quality {quality} together with {', '.join(given)}: a quality sets the method, its error "
            "bound and its density; leave one of them out, or give --max-error and --density"
        )


def command_line(context: typer.Context, leave_out: tuple[str, ...] = ("out", "force")) -> str:
    """The command that repeats a run, with the options that were given or have a default; paths that are
    nobody else's business stay out."""
    parts = ["residua", context.info_name or ""]
    for name, value in context.params.items():
        if name in leave_out or isinstance(value, Path) or value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, (list, tuple)) else [value]:
            parts += [option] if one is True else [option, str(one)]
    return shlex.join(parts)

"""Writes one file: completely or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from .interrupts import uninterrupted


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, then moves it there; a link at `path` is replaced, not followed.

    Raises:
        OSError: The folder, the file or the move failed; whatever was at `path` is still there.
    """
    scratch: Path | None = None
    try:
        with uninterrupted():
            handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
            scratch = Path(name)
            os.close(handle)
        write(scratch)
        scratch.chmod(0o644)
        os.replace(scratch, path)
    finally:
        if scratch is not None:
            with uninterrupted():
                scratch.unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """The same for a text in UTF-8."""
    write_whole(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))

"""Writes a file completely or not at all; a link in its place is replaced, not followed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, then moves it there.

    Raises:
        OSError: The folder, the file or the move failed; whatever was at `path` is still there.
    """
    handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        write(scratch)
        scratch.chmod(0o644)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """The same for a text in UTF-8."""
    write_whole(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))

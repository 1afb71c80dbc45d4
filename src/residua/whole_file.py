"""Writes a file completely or not at all, also if Ctrl-C comes in between; a link in its place is replaced,
not followed."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, then moves it there.

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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block has ended: for a few operations that belong together, such as to make a
    temporary file and to remember its name, or to remove it."""
    before = signal.getsignal(signal.SIGINT)
    # Signals come to the main thread alone. A handler that was not set from Python could not be set again.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting and callable(before):
        before(*waiting[0])

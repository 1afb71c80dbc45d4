"""Ctrl-C, delayed for as long as operations last that belong together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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

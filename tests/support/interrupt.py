"""Ctrl-C at a chosen place of a run: when a function of the package is entered."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import residua

HOME = str(Path(residua.__file__).parent)


@dataclass(frozen=True)
class Place:
    """The n-th entry into a function of the package, on the main thread. A generator is entered again when it
    goes on: the end of a context manager is a place of its own."""

    file: str  # relative to the package
    function: str
    entry: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.function}#{self.entry}"


def entries(work: Callable[[], Any]) -> dict[Place, int]:
    """Every function that `work` enters, in the order of the first entry, and how often it is entered."""
    found: dict[Place, int] = {}

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Python itself swallows what is raised while it takes an unfinished generator away.
        if event == "call" and code.co_filename.startswith(HOME) and code.co_name != "<genexpr>":
            place = _place(frame)
            found[place] = found.get(place, 0) + 1

    with _profiled(count):
        work()
    return found


@contextmanager
def interrupted_at(place: Place) -> Iterator[list[Place]]:
    """Sends SIGINT to this process at a place, once; the list that is given says whether it came to that."""
    sent: list[Place] = []
    left = place.entry

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        code = frame.f_code
        if event != "call" or code.co_name != place.function.rsplit(".", 1)[-1] or sent:
            return
        if code.co_filename.startswith(HOME) and _place(frame) == Place(place.file, place.function):
            left -= 1
            if left == 0:
                sent.append(place)
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _profiled(watch):
            yield sent
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _profiled(function: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(before)


def _place(frame: FrameType) -> Place:
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
    return Place(code.co_filename[len(HOME) + 1 :], name)

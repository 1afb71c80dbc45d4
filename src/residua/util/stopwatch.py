"""Where the time of a call goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timings:
    """Seconds per stage, in the order in which the stages ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Stopwatch:
    """Measures the time of each stage. Switched off, it costs nothing and never waits for the device."""

    def __init__(self, enabled: bool, wait: Callable[[], None]) -> None:
        """Args:
        enabled: Whether anything is measured.
        wait: Returns when the device has done what it was asked to do.
        """
        self._enabled = enabled
        self._wait = wait
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if not self._enabled:
            yield
            return
        start = self._now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    @property
    def timings(self) -> Timings | None:
        return Timings(self._seconds) if self._enabled else None

    def _now(self) -> float:
        self._wait()
        return time.perf_counter()

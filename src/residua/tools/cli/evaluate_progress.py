"""A live table for a suite: rows done, failed and running, time left, and means so far, by setting."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live

from ..evaluate.records import Record
from ..evaluate.rows import Row
from ..evaluate.run import Watcher
from ..evaluate.store import DONE, FAILED, Store
from ..evaluate.suite import Suite
from ..reports.table import Table
from .app import console

REFRESHES = 2.0  # per second


class Board(Watcher):
    """The state of every setting; rich asks it for a table whenever it redraws."""

    def __init__(self, suite: Suite) -> None:
        self._names = [setting.name for setting in suite.settings]
        self._wanted = dict.fromkeys(self._names, 0)
        self._summaries: dict[str, Record] = {}
        self._before = 0
        self._began = time.monotonic()
        self._store: Store | None = None

    def begin(self, rows: Sequence[Row], finished: Sequence[dict[str, Any]], store: Store) -> None:
        for row in rows:
            self._wanted[row.setting] += 1
        self._summaries = {row["id"]: row for row in finished}
        self._before, self._store, self._began = len(finished), store, time.monotonic()

    def told(self, summary: Record) -> None:
        self._summaries[str(summary["id"])] = summary

    def __rich__(self) -> Any:
        total, known = sum(self._wanted.values()), len(self._summaries)
        running = 0 if self._store is None else self._store.running()
        title = f"{known} of {total} rows, {running} running, {self._left(total)} left"
        columns = ("setting", "done", "failed", "left", "PSNR dB", "seconds")
        return Table(title, columns, tuple(map(self._row, self._names))).rich()

    def _row(self, name: str) -> tuple[str, ...]:
        rows = [row for row in self._summaries.values() if row["setting"] == name]
        done = [row for row in rows if row["status"] == DONE]
        failed = sum(row["status"] == FAILED for row in rows)
        left = self._wanted[name] - len(rows)
        means = (_mean(done, "psnr", "{:.2f}"), _mean(done, "seconds", "{:.2f}"))
        return name, str(len(done)), str(failed) if failed else "", str(left), *means

    def _left(self, total: int) -> str:
        made, left = len(self._summaries) - self._before, total - len(self._summaries)
        if left and made < 1:
            return "time unknown"
        seconds = (time.monotonic() - self._began) / made * left if left else 0.0
        hours, rest = divmod(round(seconds), 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _mean(rows: Sequence[Record], name: str, form: str) -> str:
    found = [float(row[name]) for row in rows if row[name] is not None and math.isfinite(row[name])]
    return form.format(math.fsum(found) / len(found)) if found else "-"


@contextmanager
def live_table(suite: Suite) -> Iterator[Board]:
    board = Board(suite)
    # A console of its own on the current stdout, because Ray's output is redirected while it runs.
    shown = Console(file=console.file, force_terminal=console.is_terminal)
    if not shown.is_terminal:  # a log file gets the table once
        yield board
        shown.print(board)
        return
    with Live(board, console=shown, refresh_per_second=REFRESHES, redirect_stdout=False, redirect_stderr=False):
        yield board

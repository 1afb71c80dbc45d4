"""Work in several processes that ends at once, and without a word, when the user stops it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from typing import TypeVar

from residua.util.interrupts import uninterrupted

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int, chunksize: int = 1
) -> Iterator[Result]:
    """The results of `work`, in the order of the jobs.

    A terminal sends Ctrl-C to every process: here only this one hears it, and ends the others, which would
    otherwise print tracebacks or finish what they have begun.
    """
    before = set(active_children())
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        with _interrupts_held():
            results = pool.map(work, jobs, chunksize=chunksize)
        yield from results
    except BaseException:
        for child in set(active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A process that is killed does not end those that work for it: they would wait for work forever."""
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that are started in this block never receive Ctrl-C; this one receives it after the block."""
    # Processes inherit the mask of this thread. It does not keep interrupts from this process, whose other
    # threads may receive them: a process that was not told what to do would end in a traceback.
    with uninterrupted():
        _start_tracker()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _start_tracker() -> None:
    """Python 3.11 starts the tracker together with the first process, and lets interrupts through after that.
    It removes what processes that were ended leave behind, and need not warn about it."""
    sys.warnoptions.append("ignore:resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove("ignore:resource_tracker")

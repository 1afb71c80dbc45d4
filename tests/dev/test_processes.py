"""Work in several processes: results in order, and Ctrl-C whichever thread of this process receives it."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path

import pytest

from dev.processes import in_processes


def test_results_in_the_order_of_the_jobs():
    assert list(in_processes(abs, [-3, 2, -1], workers=2)) == [3, 2, 1]
    assert not active_children()


def test_an_error_of_a_job_is_raised_here():
    with pytest.raises(ValueError, match="math domain"):
        list(in_processes(_root, [4, -1], workers=1))
    assert not active_children()


@pytest.fixture
def handled():
    """Waits until a signal has reached any thread of this process; Ctrl-C works as on a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    read, write = os.pipe()
    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write)
    yield lambda: os.read(read, 1)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGINT, before)
    os.close(read)
    os.close(write)


def test_ctrl_c_in_another_thread_waits_until_all_processes_have_their_work(handled):
    given, done = [], threading.Event()

    def jobs():
        given.append(1)
        yield 1  # a process is started for it
        os.kill(os.getpid(), signal.SIGINT)
        handled()
        given.append(2)
        yield 2

    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(in_processes(abs, jobs(), workers=1))
    finally:
        done.set()
        thread.join()
    assert given == [1, 2] and not active_children()


KILLED = """
import time
from dev.processes import in_processes
list(in_processes(time.sleep, [3600], workers=1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_is_killed_leaves_none_behind():
    process = subprocess.Popen([sys.executable, "-c", KILLED], cwd=Path(__file__).parents[2])
    try:
        _wait_for(lambda: any("spawn_main" in _command(pid) for pid in _children(process.pid)))
        children = _children(process.pid)
    finally:
        process.kill()
        process.wait()
    _wait_for(lambda: not any(_command(pid) for pid in children))


def _wait_for(condition) -> None:
    until = time.monotonic() + 900  # only a test that hangs gets there
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def _command(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _root(number: float) -> float:
    import math

    return math.sqrt(number)

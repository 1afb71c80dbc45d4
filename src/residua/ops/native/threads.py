"""Keeps torch's threads out of the way of our own.

A call alternates between native kernels and small torch operations. After each operation that torch spreads
over its OpenMP threads these spin for some milliseconds, waiting for the next one, on the cores that the
next kernel needs: short calls take a sixth longer. Inside `torch_on_one_thread` the calling thread's
operations stay on it; other threads of the process do not notice, because OpenMP and MKL keep these
settings per thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_LOCAL = threading.local()


def threads() -> int:
    """How many threads a kernel may use: torch's setting, as it was before `torch_on_one_thread`."""
    return getattr(_LOCAL, "threads", None) or torch.get_num_threads()


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Inside this block torch's operations of the calling thread run on that thread alone. Does nothing where
    torch is built on something other than OpenMP and MKL."""
    switches = _switches()
    before = torch.get_num_threads()
    if switches is None or before == 1 or getattr(_LOCAL, "threads", None):
        yield
        return
    set_openmp, set_mkl = switches
    mkl_before = set_mkl(1)  # 0: whatever the process uses
    set_openmp(1)
    _LOCAL.threads = before
    try:
        yield
    finally:
        _LOCAL.threads = None
        set_openmp(before)
        set_mkl(mkl_before)


@cache
def _switches() -> tuple[Callable[[int], int], Callable[[int], int]] | None:
    """`omp_set_num_threads` and `MKL_Set_Num_Threads_Local` of the libraries that torch uses."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        return library.omp_set_num_threads, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None

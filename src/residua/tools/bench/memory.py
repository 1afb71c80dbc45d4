"""Peak memory of a piece of work, as reported by the operating system."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_extra_bytes(work: Callable[[], object]) -> int | None:
    """How far resident memory rose above its level before `work`; None where the system does not report
    it."""
    try:
        _give_back()
        _CLEAR.write_text(_RESET_PEAK)
        before = _field("VmRSS")
        work()
        return max(0, _field("VmHWM") - before)
    except OSError:
        return None


def _give_back() -> None:
    """Returns freed memory to the system: otherwise the allocator reuses it and no rise shows."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")

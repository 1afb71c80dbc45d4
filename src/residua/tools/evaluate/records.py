"""What is sent between the driver and the workers: the job, and a record of each row.

A record holds the row, a status and what is known so far. A problem of one row ends as a failed row with its
reason; a problem of all rows (a full disk, a model that cannot be loaded) ends as `STOP`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ResiduaError
from .rows import Row
from .store import Store
from .suite import Suite

MADE, WAITING, STOP = "made", "waiting", "stop"
NO_FRAMES = np.zeros((0, 1, 1, 3), dtype=np.float16)
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What every worker of a run is told."""

    suite: Suite
    folder: Path
    run: str
    threads: int | None = None

    @property
    def store(self) -> Store:
        return Store(self.folder)


def clip_record(
    row: Row, status: str, reason: str, result: dict[str, Any] | None = None, frames: np.ndarray = NO_FRAMES
) -> Record:
    """A clip that waits to be measured, or the reason why there is none."""
    return {
        "row": row.to_json(),
        "status": status,
        "reason": reason,
        "result": json.dumps(result or {}),
        "frames": frames,
    }


def summary_record(
    row: Row, status: str, reason: str, psnr: float | None = None, seconds: float | None = None
) -> Record:
    """What the driver shows; NaN where there is no value, because a column of Ray has one type."""
    nothing = float("nan")
    return {
        "id": row.id,
        "setting": row.setting,
        "status": status,
        "reason": reason,
        "psnr": nothing if psnr is None else psnr,
        "seconds": nothing if seconds is None else seconds,
    }


def reason_of(error: Exception) -> str:
    """One line for the table of failed rows."""
    first = (str(error).strip().splitlines() or ["no message"])[0][:500]
    return first if isinstance(error, ResiduaError) else f"{type(error).__name__}: {first}"

"""`Measure` compares a clip with its dense one and writes the row: a plain callable, like `Generate`."""

import json
import time
import traceback
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ..metrics.physics import clip_physics
from ..metrics.video_quality import METRICS, Lpips, find_lpips, quality
from ..output import OutputError
from .records import STOP, WAITING, Job, Record, reason_of, summary_record
from .rows import Row
from .store import DONE, FAILED

REFERENCE_SECONDS = 30.0  # how long a clip waits for its dense clip; then it is stored for later


class Measure:
    """Compares a clip with its dense one and writes the row."""

    def __init__(self, job: Job, threads: int | None = 1) -> None:
        """Args:
        job: What is run.
        threads: Threads of this process: one if workers generate at the same time, whose cores it must not take;
            None: unchanged, in the process that generates.
        """
        self._job, self._store = job, job.store
        self._lpips: Lpips | str | None = None
        if threads is not None:
            torch.set_num_threads(threads)

    def __call__(self, record: Record) -> Record:
        row = Row.from_json(record["row"])
        try:
            return self._measured(row, record)
        except OutputError as error:
            return summary_record(row, STOP, str(error))
        except Exception as error:
            self._store.log(row.id, traceback.format_exc().rstrip())
            try:
                return self._finish(row, FAILED, f"not measured: {reason_of(error)}", json.loads(record["result"]))
            except OutputError as full:
                return summary_record(row, STOP, str(full))

    def _measured(self, row: Row, record: Record) -> Record:
        result, status, reason = json.loads(record["result"]), str(record["status"]), str(record["reason"])
        if status == STOP:
            return summary_record(row, STOP, reason)
        if status == FAILED:
            return self._finish(row, FAILED, reason, result)
        frames = np.asarray(record["frames"], dtype=np.float16)
        reference = frames if row.id == row.reference else self._reference(row)
        if reference is None:
            dense = self._store.read_row(row.reference)
            if dense is not None and dense["status"] == FAILED:
                self._store.drop_waiting(row.id)
                return self._finish(row, FAILED, f"its dense clip failed: {dense['reason']}", result)
            self._store.write_waiting(row.id, result, frames)
            return summary_record(row, WAITING, "its dense clip is not there yet")
        measured = self._compare(row, frames, reference, result)
        return self._finish(row, DONE, "", {**result, **measured})

    def _reference(self, row: Row) -> np.ndarray | None:
        """Waits only while a worker makes the dense clip: a dense row that got lost is made in the next
        round."""
        until = time.monotonic() + REFERENCE_SECONDS
        while (found := self._store.read_reference(row.reference)) is None:
            if not self._store.is_running(row.reference) or time.monotonic() > until:
                return self._store.read_reference(row.reference)
            time.sleep(0.1)
        return found

    def _compare(self, row: Row, frames: np.ndarray, reference: np.ndarray, result: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if row.id != row.reference:
            if self._lpips is None:
                self._lpips = find_lpips(self._job.suite.lpips)
            told = quality(frames.astype(np.float32), reference.astype(np.float32), self._lpips)
            found = {name: getattr(told, name) for name in METRICS}
            found["identical"] = bool(np.array_equal(frames, reference))
            found["not_measured"] = json.dumps(told.not_measured)
        clips = frames.astype(np.float32), reference.astype(np.float32)
        physics = clip_physics(str(result["pipeline"]), row.prompt, row.image is None, *clips)
        return {**found, **({} if physics is None else physics.columns())}

    def _finish(self, row: Row, status: str, reason: str, values: dict[str, Any]) -> Record:
        about = asdict(row)
        about.pop("image")
        self._store.write_row({**about, **values, "status": status, "reason": reason, "run": self._job.run})
        self._store.drop_waiting(row.id)
        self._store.log(row.id, status if status == DONE else f"{status}: {reason}")
        return summary_record(row, status, reason, values.get("psnr"), values.get("seconds"))

"""One row at a time: `Generate` makes a clip, `Measure` compares it and writes its row.

Both are plain callables from a record to a record, so that Ray's actors and a simple loop run the same code.
A record carries the row, a status and what is known so far. What concerns one row alone ends as a failed row
with its reason; what concerns all of them (a full disk, a model that cannot be loaded) ends as `STOP`.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import InputError, IntegrationError, ResiduaError
from ..generation import loading
from ..generation.comparison import Comparison, Timed, machine, warm_up
from ..generation.files import OutputError
from ..generation.flops import counted_passes
from ..generation.run import Generation, generate
from ..generation.videos import encode_mp4, enlarged, to_pixels
from ..integration.report import Report, ReportRow
from ..lab.video_quality import METRICS, Lpips, VideoQuality, find_lpips, quality
from .physics import physics_columns
from .rows import Row
from .store import DONE, FAILED, Store
from .suite import Setting, Suite

MADE, WAITING, STOP = "made", "waiting", "stop"
REFERENCE_SECONDS = 30.0  # how long a clip waits for a dense one that is being made; then it is put aside
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


class StopError(Exception):
    """Something that concerns every row: nothing more can be done in this run."""


class Generate:
    """Loads the pipeline with its first row and keeps it."""

    def __init__(self, job: Job) -> None:
        self._job, self._store = job, job.store
        self._pipe: Any = None
        self._linear_flops: int | None = None
        self._warm = False
        if job.threads is not None:
            torch.set_num_threads(job.threads)

    def __call__(self, record: Record) -> Record:
        row = Row.from_json(record["row"])
        try:
            return self._attempts(row)
        except StopError as error:
            return _record(row, STOP, str(error))
        except OutputError as error:
            self._store.log(row.id, f"stopped: {error}")
            return _record(row, STOP, str(error))

    def _attempts(self, row: Row) -> Record:
        kept = self._store.read_waiting(row.id)
        if kept is not None:
            return _record(row, MADE, "", *kept)
        retries = self._job.suite.work.retries
        attempt, died_in = self._store.begin(row.id, self._job.run, self._phase)
        while attempt <= retries + 1:
            self._store.log(row.id, f"attempt {attempt}: {row.setting}, seed {row.seed}: {row.prompt}")
            try:
                result, frames = self._make(row, attempt)
            except (StopError, OutputError):
                self._store.end(row.id)
                raise
            except Exception as error:
                self._store.log(row.id, traceback.format_exc().rstrip())
                reason = _reason(error)
                if isinstance(error, InputError) or attempt > retries:
                    self._store.end(row.id)
                    return _record(row, FAILED, reason, {"attempts": attempt})
                attempt += 1
                continue
            self._store.end(row.id)
            return _record(row, MADE, "", {**result, "attempts": attempt}, frames)
        self._store.end(row.id)
        if died_in == "loading":
            raise StopError(
                f"a worker died {attempt - 1} times while it loaded {self._job.suite.model}: out of memory? "
                "Fewer [run] workers need less of it"
            )
        reason = (
            f"the worker died {attempt - 1} times while it made this row (killed, out of memory, or crashed)"
        )
        self._store.log(row.id, reason)
        return _record(row, FAILED, reason, {"attempts": attempt - 1})

    @property
    def _phase(self) -> str:
        return "loading" if self._pipe is None else "making"

    def _make(self, row: Row, attempt: int) -> tuple[dict[str, Any], np.ndarray]:
        pipe = self._loaded()
        self._store.phase(row.id, self._job.run, "making", attempt)
        suite = self._job.suite
        request = suite.generation.request(row.prompt, row.seed, _image(row.image))
        self._warm_up(pipe, request)
        setting = suite.setting(row.setting)
        clip, report, passes = _run(pipe, setting, request)
        frames = clip.frames.astype(np.float16)
        pixels = to_pixels(frames.astype(np.float32))
        self._store.write_video(row, encode_mp4(enlarged(pixels), suite.generation.fps))
        if setting.is_dense:
            self._store.write_reference(row.id, frames)
        result = {
            "hash": hash_pixels(pixels), "seconds": clip.seconds, "cpu_seconds": clip.cpu_seconds,
            "waited": clip.waited, "pipeline": type(pipe).__name__, "hardware": hardware(),
            "host": socket.gethostname(), "frames": pixels.shape[0], "height": pixels.shape[1],
            "width": pixels.shape[2], **self._accounts(report, setting, row, clip, passes),
        }  # fmt: skip
        self._store.log(row.id, f"made in {clip.seconds:.2f} s: {row.video}")
        return result, frames

    def _loaded(self) -> Any:
        if self._pipe is None:
            work = self._job.suite.work
            try:
                self._pipe = loading.load(
                    self._job.suite.model, loading.Placement(work.device, work.dtype, work.offload)
                )
            except (InputError, IntegrationError) as error:
                raise StopError(str(error)) from error
        return self._pipe

    def _warm_up(self, pipe: Any, request: Any) -> None:
        """Once per worker, so that no row pays for being first; also counts what a pass costs."""
        if not self._warm:
            settings = [setting.sparsity for setting in self._job.suite.settings if setting.sparsity]
            self._linear_flops = warm_up(pipe, request, settings[0], lambda name: lambda done, total: None)
            self._warm = True

    def _accounts(
        self, report: Report | None, setting: Setting, row: Row, clip: Generation, passes: int
    ) -> dict[str, Any]:
        """What the sparse calls did; nothing for dense attention, which has no report."""
        if report is None or setting.sparsity is None:
            return {}
        timed = Timed(clip, (clip.seconds,), (clip.cpu_seconds,), (clip.waited,))
        request = self._job.suite.generation.request(row.prompt, row.seed)
        told = Comparison(
            self._job.suite.model, request, setting.sparsity, timed, None, passes, report,
            VideoQuality.nothing("measured later"),
        )  # fmt: skip
        total = report.total
        return {
            "density": total.density, "cost": total.cost, "error": total.error, "tokens": told.tokens,
            "sparse_calls": total.sparse, "dense_calls": total.dense_calls, "notes": told.all_dense or "",
            "pflops": self._pflops(told, passes, dense=False),
            "dense_pflops": self._pflops(told, passes, dense=True),
            "layers": _parts(report, "layers"), "steps": _parts(report, "steps"),
        }  # fmt: skip

    def _pflops(self, told: Comparison, passes: int, dense: bool) -> float | None:
        if self._linear_flops is None:
            return None
        return (told.attention_flops(dense) + passes * self._linear_flops) / 1e15


class Measure:
    """Compares a clip with its dense one and writes the row."""

    def __init__(self, job: Job) -> None:
        self._job, self._store = job, job.store
        self._lpips: Lpips | str | None = None
        torch.set_num_threads(1)  # beside the workers that generate, it must not take their cores

    def __call__(self, record: Record) -> Record:
        row = Row.from_json(record["row"])
        try:
            return self._measured(row, record)
        except OutputError as error:
            return _summary(row, STOP, str(error))
        except Exception as error:
            self._store.log(row.id, traceback.format_exc().rstrip())
            try:
                return self._finish(
                    row, FAILED, f"not measured: {_reason(error)}", json.loads(record["result"])
                )
            except OutputError as full:
                return _summary(row, STOP, str(full))

    def _measured(self, row: Row, record: Record) -> Record:
        result, status, reason = json.loads(record["result"]), str(record["status"]), str(record["reason"])
        if status == STOP:
            return _summary(row, STOP, reason)
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
            return _summary(row, WAITING, "its dense clip is not there yet")
        measured = self._compare(row, frames, reference, result)
        return self._finish(row, DONE, "", {**result, **measured})

    def _reference(self, row: Row) -> np.ndarray | None:
        """Waits only while somebody makes it: a dense row that got lost is made in the next round."""
        until = time.monotonic() + REFERENCE_SECONDS
        while (found := self._store.read_reference(row.reference)) is None:
            if not self._store.is_running(row.reference) or time.monotonic() > until:
                return self._store.read_reference(row.reference)
            time.sleep(0.1)
        return found

    def _compare(
        self, row: Row, frames: np.ndarray, reference: np.ndarray, result: dict[str, Any]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if row.id != row.reference:
            if self._lpips is None:
                self._lpips = find_lpips(self._job.suite.lpips)
            told = quality(frames.astype(np.float32), reference.astype(np.float32), self._lpips)
            found = {name: getattr(told, name) for name in METRICS}
            found["identical"] = bool(np.array_equal(frames, reference))
            found["not_measured"] = json.dumps(told.not_measured)
        return {**found, **physics_columns(str(result["pipeline"]), row, frames, reference)}

    def _finish(self, row: Row, status: str, reason: str, values: dict[str, Any]) -> Record:
        about = asdict(row)
        about.pop("image")
        self._store.write_row({**about, **values, "status": status, "reason": reason, "run": self._job.run})
        self._store.drop_waiting(row.id)
        self._store.log(row.id, status if status == DONE else f"{status}: {reason}")
        return _summary(row, status, reason, values.get("psnr"), values.get("seconds"))


def hash_pixels(pixels: np.ndarray) -> str:
    """Of a clip as it is shown, 8 bits a channel.  # [T, H, W, 3] uint8"""
    shape = "x".join(map(str, pixels.shape)).encode()
    return hashlib.sha256(shape + b":" + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def hardware() -> str:
    """What a clip was made on: times of two rows compare only if it is the same."""
    found = machine()
    return ", ".join([*found["gpus"][:1]] or [f"{found['cpu']}, {found['threads']} threads"])


def _run(pipe: Any, setting: Setting, request: Any) -> tuple[Generation, Report | None, int]:
    if setting.sparsity is None:
        with _floor(pipe) if setting.is_floor else nullcontext(), counted_passes(pipe) as passes:
            return generate(pipe, request), None, passes.count
    with setting.sparsity.accelerate(pipe, profile=False) as handle, counted_passes(pipe) as passes:
        clip = generate(pipe, request)
        return clip, handle.report(), passes.count


def _floor(pipe: Any) -> AbstractContextManager[None]:
    """Dense attention that sums in another order."""
    from ..generation.floor import another_order

    return another_order(pipe)


def _image(path: str | None) -> Any:
    if path is None:
        return None
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise InputError(f"{path}: not an image that can be read ({error})") from error


def _parts(report: Report, of: str) -> list[dict[str, Any]]:
    """Error and cost of every layer or step, over all transformers."""
    several = len(report.transformers) > 1
    found: list[dict[str, Any]] = []
    for transformer in report.transformers:
        part: ReportRow
        for part in getattr(transformer, of):
            name = f"{transformer.name}.{part.name}" if several else part.name
            found.append({"name": name, "density": part.density, "cost": part.cost, "error": part.error})
    return found


def _record(
    row: Row, status: str, reason: str, result: dict[str, Any] | None = None, frames: np.ndarray = NO_FRAMES
) -> Record:
    return {
        "row": row.to_json(), "status": status, "reason": reason, "result": json.dumps(result or {}),
        "frames": frames,
    }  # fmt: skip


def _summary(
    row: Row, status: str, reason: str, psnr: float | None = None, seconds: float | None = None
) -> Record:
    """What the driver shows; NaN where there is nothing, because a column of Ray has one type."""
    nothing = float("nan")
    return {
        "id": row.id, "setting": row.setting, "status": status, "reason": reason,
        "psnr": nothing if psnr is None else psnr, "seconds": nothing if seconds is None else seconds,
    }  # fmt: skip


def _reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0][:500]
    return first if isinstance(error, ResiduaError) else f"{type(error).__name__}: {first}"

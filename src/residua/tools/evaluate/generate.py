"""`Generate` makes clips, one row at a time: a plain callable for Ray's actors and for a simple loop."""

import hashlib
import socket
import traceback
from typing import Any

import numpy as np
import torch

from ...errors import InputError, IntegrationError
from ...hosts import Report, ReportRow
from ..generate import loading
from ..generate.compare import ClipRun, generate_once, warm_up
from ..generate.comparison import machine, total_pflops, video_tokens, why_all_dense
from ..generate.run import Request
from ..generate.videos import encode_mp4, enlarged, to_pixels
from ..output import OutputError
from .records import MADE, STOP, Job, Record, clip_record, reason_of
from .rows import Row
from .store import FAILED


class StopError(Exception):
    """Something that affects every row: the run cannot go on."""


class Generate:
    """Loads the pipeline with the first row and keeps it."""

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
            return clip_record(row, STOP, str(error))
        except OutputError as error:
            self._store.log(row.id, f"stopped: {error}")
            return clip_record(row, STOP, str(error))

    def _attempts(self, row: Row) -> Record:
        kept = self._store.read_waiting(row.id)
        if kept is not None:
            return clip_record(row, MADE, "", *kept)
        retries = self._job.suite.work.retries
        attempt, died_in = self._store.begin(row.id, self._job.run, self._phase)
        while attempt <= retries + 1:
            self._store.log(row.id, f"attempt {attempt}: {row.setting}, seed {row.seed}: {row.prompt}")
            try:
                result, frames = self._make(row, attempt)
            except (StopError, OutputError, KeyboardInterrupt):
                self._store.end(row.id)
                raise
            except Exception as error:
                self._store.log(row.id, traceback.format_exc().rstrip())
                reason = reason_of(error)
                if isinstance(error, InputError) or attempt > retries:
                    self._store.end(row.id)
                    return clip_record(row, FAILED, reason, {"attempts": attempt})
                attempt += 1
                continue
            self._store.end(row.id)
            return clip_record(row, MADE, "", {**result, "attempts": attempt}, frames)
        self._store.end(row.id)
        if died_in == "loading":
            raise StopError(
                f"a worker died {attempt - 1} times while it loaded {self._job.suite.model}: out of memory? "
                "Fewer [run] workers need less of it"
            )
        reason = f"the worker died {attempt - 1} times while it made this row (killed, out of memory, or crashed)"
        self._store.log(row.id, reason)
        return clip_record(row, FAILED, reason, {"attempts": attempt - 1})

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
        run = generate_once(pipe, request, setting.asked, reordered=setting.is_noise_floor)
        clip = run.clip
        frames = clip.frames.astype(np.float16)
        pixels = to_pixels(frames.astype(np.float32))
        self._store.write_video(row, encode_mp4(enlarged(pixels), suite.generation.fps))
        if setting.is_dense:
            self._store.write_reference(row.id, frames)
        result = {
            "hash": hash_pixels(pixels),
            "seconds": clip.seconds,
            "cpu_seconds": clip.cpu_seconds,
            "waited": clip.waited,
            "pipeline": type(pipe).__name__,
            "hardware": hardware(),
            "host": socket.gethostname(),
            "frames": pixels.shape[0],
            "height": pixels.shape[1],
            "width": pixels.shape[2],
            **self._accounts(run),
        }
        self._store.log(row.id, f"made in {clip.seconds:.2f} s: {row.video}")
        return result, frames

    def _loaded(self) -> Any:
        if self._pipe is None:
            work = self._job.suite.work
            try:
                self._pipe = loading.load(
                    self._job.suite.model, loading.PipelinePlacement(work.device, work.dtype, work.offload)
                )
            except (InputError, IntegrationError) as error:
                raise StopError(str(error)) from error
        return self._pipe

    def _warm_up(self, pipe: Any, request: Request) -> None:
        """Once per worker, so that no row is slower for being first; also counts the FLOPs of a pass."""
        if not self._warm:
            settings = [setting.asked for setting in self._job.suite.settings if setting.asked]
            self._linear_flops = warm_up(pipe, request, settings[0], lambda name: lambda done, total: None)
            self._warm = True

    def _accounts(self, run: ClipRun) -> dict[str, Any]:
        """What the sparse calls did; empty for dense attention, which has no report."""
        report, linear = run.report, self._linear_flops
        if report is None:
            return {}
        total = report.total
        return {
            "density": total.density,
            "cost": total.cost,
            "error": total.error,
            "tokens": video_tokens(report),
            "sparse_calls": total.sparse,
            "dense_calls": total.dense_calls,
            "notes": why_all_dense(report) or "",
            "pflops": total_pflops(report, run.passes, linear, dense=False),
            "dense_pflops": total_pflops(report, run.passes, linear, dense=True),
            "layers": _parts(report, "layers"),
            "steps": _parts(report, "steps"),
        }


def hash_pixels(pixels: np.ndarray) -> str:
    """Hash of a clip as it is shown, 8 bits per channel.  # [T, H, W, 3] uint8"""
    shape = "x".join(map(str, pixels.shape)).encode()
    return hashlib.sha256(shape + b":" + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def hardware() -> str:
    """The hardware that made a clip: times of two rows are only comparable if it is the same."""
    found = machine()
    return ", ".join([*found["gpus"][:1]] or [f"{found['cpu']}, {found['threads']} threads"])


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

"""One generation: the request to a pipeline, and the clip with its time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import InputError, IntegrationError

Progress = Callable[[int, int], None]  # steps done, steps in all

# Our name -> the pipeline's.
ARGUMENTS = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "image": "image",
    "height": "height",
    "width": "width",
    "frames": "num_frames",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
}


@dataclass(frozen=True)
class Request:
    """What to generate; None leaves a value to the pipeline."""

    prompt: str
    seed: int = 0
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    guidance: float | None = None
    negative_prompt: str | None = None
    image: Any = None

    def __post_init__(self) -> None:
        for name in ("steps", "height", "width", "frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: wanted at least 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed={self.seed}: wanted a whole number from 0 to 2^63 - 1")

    def arguments(self, pipe: Any) -> dict[str, Any]:
        """The request as keywords of the pipeline; raises for a value that the pipeline does not take."""
        known = inspect.signature(type(pipe).__call__).parameters
        given = {ours: getattr(self, ours) for ours in ARGUMENTS if getattr(self, ours) is not None}
        refused = [ours for ours in given if ARGUMENTS[ours] not in known]
        if refused:
            raise InputError(
                f"{type(pipe).__name__} takes no {', '.join(ARGUMENTS[name] for name in refused)}: leave out "
                f"--{', --'.join(name.replace('_', '-') for name in refused)}"
            )
        found = {ARGUMENTS[ours]: value for ours, value in given.items()}
        return {**found, "generator": torch.Generator("cpu").manual_seed(self.seed), "output_type": "np"}


@dataclass(frozen=True)
class Clip:
    """A clip and its time, from the call of the pipeline to the frames."""

    frames: np.ndarray  # [T, H, W, 3] in [0, 1]
    seconds: float
    cpu_seconds: float  # of all threads; does not include what other programs used
    step_seconds: tuple[float, ...]
    waited: float | None = None  # seconds in which it was ready to run and other work had the core


def generate(pipe: Any, request: Request, progress: Progress | None = None) -> Clip:
    """Runs the pipeline once and measures its time."""
    arguments = request.arguments(pipe)
    with _watched(pipe, progress) as ticks:
        _synchronise()
        began, began_cpu, before = time.perf_counter(), time.process_time(), _waited()
        result = pipe(**arguments)
        _synchronise()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        after = _waited()
    steps = tuple(float(gap) for gap in np.diff([began, *ticks]))
    waited = None if before is None or after is None else after - before
    return Clip(_clip(result), seconds, cpu_seconds, steps, waited)


def parse_size(text: str) -> tuple[int, int]:
    """'64' or '832x480' (width x height) -> height, width."""
    parts = text.lower().split("x")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise InputError(f"size {text!r}: wanted one number, or width x height such as 832x480")
    return numbers[-1], numbers[0]


def _clip(result: Any) -> np.ndarray:
    """The first clip of whatever a pipeline returned; Cosmos3 names it `video`."""
    batch = getattr(result, "frames", None)
    batch = getattr(result, "video", None) if batch is None else batch
    if batch is None:
        raise IntegrationError(f"{type(result).__name__} has neither frames nor video: not a video pipeline")
    clip = batch[0] if np.ndim(batch[0]) == 4 or isinstance(batch[0], list) else batch
    frames = np.stack([np.asarray(frame) for frame in clip])
    if frames.dtype == np.uint8:
        frames = frames / np.float32(255)
    return frames.astype(np.float32)


class _Bar:
    """Replaces tqdm inside a pipeline."""

    def __init__(self, total: int, ticks: list[float], progress: Progress | None) -> None:
        self._total, self._ticks, self._progress = total, ticks, progress
        self._done = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def update(self, steps: int = 1) -> None:
        self._done += steps
        self._ticks.append(time.perf_counter())
        if self._progress is not None:
            self._progress(self._done, self._total)

    def set_postfix(self, *_: Any, **__: Any) -> None:
        return None


@contextmanager
def _watched(pipe: Any, progress: Progress | None) -> Iterator[list[float]]:
    """Reports steps through `self.progress_bar`, which every pipeline of diffusers uses; not all have
    callbacks."""
    ticks: list[float] = []

    def progress_bar(iterable: Any = None, total: int | None = None) -> Any:
        if iterable is None:
            return _Bar(int(total or 0), ticks, progress)
        return _each(iterable, _Bar(len(iterable), ticks, progress))

    pipe.progress_bar = progress_bar
    try:
        yield ticks
    finally:
        del pipe.progress_bar


def _each(items: Any, bar: _Bar) -> Iterator[Any]:
    for item in items:
        yield item
        bar.update()


def _waited() -> float | None:
    """Seconds that this thread has waited for a core so far; None where the system does not report it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""Records the self-attention calls of a diffusers pipeline while it runs, dense and unchanged."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, IntegrationError
from ...hosts import Site, key_padding
from .captures import Ranges
from .writer import CaptureWriter

Progress = Callable[[int], None]  # calls recorded so far


@dataclass(frozen=True)
class Selection:
    """What to record. None records all; negative numbers count from the end."""

    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    branches: tuple[str, ...] | None = None


class Recorder:
    """Wraps `AttentionLayer.run` of every selected layer."""

    def __init__(self, writer: CaptureWriter, selection: Selection, pipe: Any, progress: Progress | None):
        self.writer = writer
        self.selection = selection
        self.pipe = pipe
        self.progress = progress
        self.full = False  # the size limit was reached
        self.seen: set[int] = set()  # steps
        self.skipped: set[str] = set()  # reasons

    def observe(self, layer: Any) -> None:
        run = layer.run

        def observed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
            if not causal:
                self._record(layer, q, k, v, mask, scale)
            return run(q, k, v, mask, scale, causal)

        layer.run = observed

    def _record(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> None:
        """q [B, Nq, H, D], k and v [B, Nk, Hkv, D]."""
        site = layer.site(q.shape[1], k.shape[1])
        steps = self._steps(site.now.steps)
        self.seen.add(site.now.step)
        if self.full or (steps is not None and site.now.step > max(steps, default=-1)):
            self._stop()
            return
        branches = self.selection.branches
        if (steps is not None and site.now.step not in steps) or (branches and site.now.branch not in branches):
            return
        places = _places(site, q, k, mask)
        if places is None:
            self.skipped.add(f"{layer.name}: its mask is not key padding")
            return
        for element, place in enumerate(places):
            branch = site.now.branch if len(q) == 1 else f"{site.now.branch}/{element}"
            for head in _numbers("heads", self.selection.heads, q.shape[2]):
                shared = head * k.shape[2] // q.shape[2]
                rows = q[element, :, head], k[element, :, shared], v[element, :, shared]
                key = {"layer": site.layer, "head": head, "step": site.now.step, "branch": branch}
                self._add(key, *rows, scale, place)

    def _add(self, key: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, scale: float | None, place: _Place) -> None:
        """Writes one head, q [Nq, D], k [Nk, D], v [Nk, Dv], unless it is there."""
        if self.full or self.writer.has(**key):
            return
        q = q if place.queries is None else q[place.queries]
        k, v = (x if place.keys is None else x[place.keys] for x in (k, v))
        text: dict[str, Any] = {"text": place.text or None, "text_queries": place.text_queries or None}
        added = self.writer.add(q, k, v, **key, grid=place.grid, scale=scale, **text)
        # otherwise another process has recorded it meanwhile
        self.full = not added and not self.writer.has(**key)
        if self.progress is not None:
            self.progress(len(self.writer))

    def _steps(self, total: int | None) -> set[int] | None:
        steps = self.selection.steps
        if steps is None:
            return None
        if total is None and min(steps, default=0) < 0:
            raise InputError(f"steps={list(steps)}: the number of steps is unknown; count from 0")
        return set(steps) if total is None else set(_numbers("steps", steps, total))

    def _stop(self) -> None:
        """Stops the pipeline, if it can be interrupted, because everything wanted is recorded."""
        if hasattr(self.pipe, "_interrupt"):
            self.pipe._interrupt = True


@dataclass(frozen=True)
class _Place:
    """The tokens of one batch element that are not padding, and where its video is among them."""

    queries: Tensor | None  # None: all
    keys: Tensor | None
    grid: tuple[int, int, int] | None
    text: Ranges
    text_queries: Ranges


def _places(site: Site, q: Tensor, k: Tensor, mask: Tensor | None) -> list[_Place] | None:
    queries, keys = q.shape[1], k.shape[1]
    text_queries, text = site.text_queries, site.text_keys
    if mask is None:
        return [_Place(None, None, site.now.grid, text, text_queries)] * len(q)
    valid = key_padding(mask, len(q))
    if valid is None:
        return None
    places = []
    for kept in valid.cpu():
        before = torch.nn.functional.pad(kept.cumsum(0), (1, 0)).tolist()
        index, moved = kept.nonzero()[:, 0].to(q.device), _moved(text, before)
        # nobody reads the query rows of padding
        rows, rows_text = (index, _moved(text_queries, before)) if queries == keys else (None, text_queries)
        places.append(_Place(rows, index, site.now.grid, moved, rows_text))
    return places


def _moved(ranges: Ranges, before: Sequence[int]) -> Ranges:
    pairs = ((before[start], before[stop]) for start, stop in ranges)
    return tuple((start, stop) for start, stop in pairs if stop > start)


def _numbers(name: str, wanted: Sequence[int] | None, total: int) -> list[int]:
    if wanted is None:
        return list(range(total))
    for number in wanted:
        if not isinstance(number, int) or not -total <= number < total:
            raise InputError(f"{name}={list(wanted)}: no {number!r}; wanted numbers from 0 to {total - 1}")
    return sorted({number % total for number in wanted})


@contextmanager
def dense_on_purpose() -> Iterator[None]:
    """Silences the warning that nothing was sparse, because here that is intended."""
    logger = logging.getLogger("residua.hosts")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def recording(
    pipe: Any, writer: CaptureWriter, selection: Selection, progress: Progress | None = None
) -> Iterator[Recorder]:
    """Inside this block everything that `pipe` runs is dense, and the selected calls are written."""
    from ...hosts.diffusers import accelerate
    from ...hosts.settings import chosen_layers

    recorder = Recorder(writer, selection, pipe, progress)
    with dense_on_purpose(), accelerate(pipe, dense_steps=0, dense_layers=1.0, min_tokens=0) as handle:
        if len(handle.attachments) > 1:
            raise IntegrationError("the pipeline has two transformers; record one: recording(pipe.transformer)")
        layers = handle.attachments[0].layers
        chosen = chosen_layers(selection.layers, [layer.name for layer in layers])
        for layer in layers:
            if layer.index in chosen:
                recorder.observe(layer)
        yield recorder


def capture(
    pipe: Any,
    folder: str | Path,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    branches: Sequence[str] | None = None,
    limit_bytes: int = 1 << 30,
    model: str | None = None,
    run: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> Recorder:
    """Runs `pipe(**arguments)` once and writes the selected self-attention calls into `folder`.

    The run stops when all of them are recorded. Repeating the call after an interruption records what is
    missing. `run` describes the generation in the manifest; by default, the arguments that are plain values.

    >>> residua.tools.capture.capture(pipe, "captures", layers=[2, 5], heads=[0, 1], steps=[4, 5], prompt="...")
    """
    plain = {name: value for name, value in arguments.items() if isinstance(value, (str, int, float))}
    generator = arguments.get("generator")
    if isinstance(generator, torch.Generator):
        # the seed is not enough: a generator may have been used before
        plain["generator"] = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:16]
    name = model or type(pipe).__name__.removesuffix("Pipeline")
    writer = CaptureWriter(folder, name, limit_bytes, plain if run is None else run)
    selection = Selection(*(None if x is None else tuple(x) for x in (layers, heads, steps, branches)))  # type: ignore[arg-type]
    with recording(pipe, writer, selection, progress) as recorder:
        pipe(**arguments)
    if not len(writer):
        reason = "; ".join(sorted(recorder.skipped)) or f"steps {sorted(recorder.seen)} ran"
        raise InputError(f"nothing was recorded ({reason}); look at layers, heads, steps and limit_bytes")
    return recorder

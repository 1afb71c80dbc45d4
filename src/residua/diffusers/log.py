"""What one layer did: calls, pairs, error estimates and time, without making the device wait."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Numbers that differ from call to call: without them, equal notes are counted together.
_MEASURED = re.compile(r"\d+\.\d{4,}|\b\d+(?= of \d+ heads)")
PAIRS = ("routed", "probe", "pinned", "exact", "total", "possible")


class Clock:
    """Adds up wall time. On CUDA it records events and reads them only in `seconds`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            stop.record()
            self._events.append((start, stop))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        events, self._events = self._events, []
        for start, stop in events:
            stop.synchronize()
            self._seconds += start.elapsed_time(stop) / 1000.0
        return self._seconds


class LayerLog:
    """Receipts are kept as they come and read in `settle`: reading one may wait for the device."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sparse = 0
        self.warm = 0
        self.dense: Counter[str] = Counter()  # reason -> calls
        self.dense_pairs = 0
        self.pairs: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()  # work beside the pairs, in pair equivalents
        self.chosen: Counter[str] = Counter()  # what the heads chose, over heads and calls
        self.flops = 0  # of the sparse calls
        self.stages: Counter[str] = Counter()  # seconds, where the calls were profiled
        self.errors: list[float] = []
        self.shapes: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        self.backends: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.sparse_clock = Clock()
        self.dense_clock = Clock()
        self.device = ""  # of the last call
        self._receipts: list[Any] = []

    @contextmanager
    def dense_call(self, reason: str, q: Tensor, k: Tensor) -> Iterator[None]:
        with self.dense_clock.running(q.device):
            yield
        self.dense[reason] += 1
        self.dense_pairs += q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
        self._saw(q, k)

    @contextmanager
    def sparse_call(self, q: Tensor, k: Tensor) -> Iterator[Callable[[Any], None]]:
        with self.sparse_clock.running(q.device):
            yield self._receipts.append
        self.sparse += 1
        self._saw(q, k)

    def _saw(self, q: Tensor, k: Tensor) -> None:
        self.device = q.device.type
        self.shapes[tuple(q.shape), tuple(k.shape)] += 1  # [B, Nq, H, D], [B, Nk, Hkv, D]

    def settle(self) -> None:
        """Reads the receipts that came since the last time."""
        receipts, self._receipts = self._receipts, []
        for receipt in receipts:
            self.warm += bool(receipt.warm)
            self.pairs.update({name: int(getattr(receipt.pairs, name)) for name in PAIRS})
            self.beside.update({name: float(work.sum()) for name, work in receipt.beside.items()})
            self.chosen.update(receipt.chosen)
            self.flops += int(receipt.flops)
            if receipt.timings is not None:
                self.stages.update(receipt.timings.seconds)
            self.backends[receipt.backend] += 1
            self.notes.update(_MEASURED.sub("...", note) for note in receipt.notes)
            error = None if receipt.error is None else float(receipt.error)
            if error is not None and not math.isfinite(error):
                self.notes["the error estimate is not finite: NaN or Inf in the model's tensors"] += 1
            elif error is not None:
                self.errors.append(error)

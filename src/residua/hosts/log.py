"""Records what the attention calls of a host did: calls, pairs, error estimates and time, without waiting for
the device."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..receipt import Receipt

PAIRS = ("routed", "probe", "pinned", "exact", "total", "possible")
NOT_FINITE = "the error estimate is not finite: NaN or Inf in the model's tensors"

Shape = tuple[tuple[int, ...], tuple[int, ...]]  # q [B, H, Nq, D], k [B, Hkv, Nk, D]


class CallTimer:
    """Adds up wall time of calls. On CUDA it records events, which are read only in `seconds`."""

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
        """The total so far; on CUDA this waits for the last call."""
        events, self._events = self._events, []
        for start, stop in events:
            stop.synchronize()
            self._seconds += start.elapsed_time(stop) / 1000.0
        return self._seconds


class Tally:
    """The calls of one layer in one branch and step. Receipts are collected unread, because reading one may
    wait for the device; `read_receipts` reads them."""

    def __init__(self) -> None:
        self.sparse = 0
        self.warm = 0
        self.reused = 0.0  # warm calls that kept their groups, weighted by the share of their heads
        self.dense: Counter[str] = Counter()  # reason -> calls
        self.dense_pairs = 0
        self.sparse_pairs = 0  # pairs that the sparse calls would have evaluated if dense, padding included
        self.pairs: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()  # work other than pairs, in pair equivalents
        self.chosen: Counter[str] = Counter()  # choices of the heads, over heads and calls
        self.flops = 0  # of the sparse calls
        self.stages: Counter[str] = Counter()  # seconds, if stages were timed
        self.errors: list[float] = []
        self.shapes: Counter[Shape] = Counter()
        self.backends: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()  # by kind
        self.sparse_timer = CallTimer()
        self.dense_timer = CallTimer()
        self._receipts: list[Receipt] = []

    @contextmanager
    def dense_call(self, reason: str, q: Tensor, k: Tensor) -> Iterator[None]:
        with self.dense_timer.running(q.device):
            yield
        self.dense[reason] += 1
        self.dense_pairs += _pairs(q, k)
        self.shapes[tuple(q.shape), tuple(k.shape)] += 1

    @contextmanager
    def sparse_call(self, q: Tensor, k: Tensor) -> Iterator[Callable[[Receipt], None]]:
        with self.sparse_timer.running(q.device):
            yield self._receipts.append
        self.sparse += 1
        self.sparse_pairs += _pairs(q, k)
        self.shapes[tuple(q.shape), tuple(k.shape)] += 1

    def read_receipts(self) -> list[Receipt]:
        """Adds up the receipts that are new since the last time, and returns them."""
        receipts, self._receipts = self._receipts, []
        for receipt in receipts:
            self.warm += receipt.warm
            self.reused += receipt.reused
            self.pairs.update({name: int(getattr(receipt.pairs, name)) for name in PAIRS})
            self.beside.update({name: float(work.sum()) for name, work in receipt.beside.items()})
            self.chosen.update(receipt.chosen)
            self.flops += receipt.flops
            if receipt.timings is not None:
                self.stages.update(receipt.timings.seconds)
            self.backends[receipt.backend] += 1
            self.notes.update(note.kind for note in receipt.notes)
            if receipt.error is None:
                continue
            if math.isfinite(receipt.error):
                self.errors.append(receipt.error)
            else:
                self.notes[NOT_FINITE] += 1
        return receipts


class Key(NamedTuple):
    """Which calls a tally counts; the report can sum tallies along any of these."""

    layer: int
    branch: str
    step: int


class CallLog:
    """The tallies of one host, by layer, branch and step, over all runs."""

    def __init__(self, layers: Iterable[str] = ()) -> None:
        self.names: dict[int, str] = dict(enumerate(layers))  # of the layers
        self.clear()

    def clear(self) -> None:
        self.tallies: dict[Key, Tally] = {}
        self.devices: set[str] = set()

    def at(self, layer: int, name: str, branch: str, step: int, device: torch.device) -> Tally:
        self.names.setdefault(layer, name)
        self.devices.add(device.type)
        return self.tallies.setdefault(Key(layer, branch, step), Tally())

    def read_receipts(self) -> list[Receipt]:
        """Reads receipts and timing events of all tallies."""
        found = [receipt for tally in self.tallies.values() for receipt in tally.read_receipts()]
        for tally in self.tallies.values():
            tally.sparse_timer.seconds()
            tally.dense_timer.seconds()
        return found


def _pairs(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]

"""Every query-key pair of a call, counted; and the receipt that says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .config import Config
from .routing import pinned_keys, valid_keys
from .types import Call, Route, Timings


@dataclass(frozen=True)
class Pairs:
    """Query-key pairs, as totals (int) or per head (int64 tensors [B, H])."""

    routed: Any  # free rows x keys of their kept cells, without pinned keys
    probe: Any  # probe rows x all keys
    pinned: Any  # free rows x pinned keys
    exact: Any  # exact rows x all keys
    possible: Any  # what dense attention evaluates: all rows x keys that are not padding

    @property
    def total(self) -> Any:
        return self.routed + self.probe + self.pinned + self.exact

    def density(self, part: str = "total") -> Any:
        """A part as a share of the possible pairs; 0 where nothing is possible."""
        value = getattr(self, part)
        if isinstance(self.possible, Tensor):
            return value / self.possible.clamp(min=1)
        return value / self.possible if self.possible else 0.0

    def sum(self) -> Pairs:
        return Pairs(
            *(int(t.sum()) for t in (self.routed, self.probe, self.pinned, self.exact, self.possible))
        )


@dataclass(frozen=True)
class Receipt:
    """What a call did: the pairs it evaluated, how far off it expects to be, and what it had to change.

    The counts stay on the device until they are read, so that a receipt does not make a GPU wait.
    """

    target: float
    per_head: Pairs  # [B, H]
    error_per_head: Tensor | None  # [B, H], estimated mean relative row error; None without probes
    routing_products: int  # anchor-key products of the router, not counted in the density
    head_dims: tuple[int, int]  # D, Dv
    groups: tuple[int, int]  # query groups, K/V groups; (0, 0) if every pair was evaluated
    backend: str
    warm: bool
    always: str  # what is evaluated whatever the target is
    clamps: tuple[str, ...] = ()
    timings: Timings | None = None

    @cached_property
    def pairs(self) -> Pairs:
        """Totals over batch and heads."""
        return self.per_head.sum()

    @property
    def density(self) -> float:
        """Realised share of the pairs: routed cells, probes, pinned keys and exact rows."""
        return float(self.pairs.density())

    @cached_property
    def error(self) -> float | None:
        """Estimated mean relative row error over all heads, from the probes; None without probes."""
        return None if self.error_per_head is None else float(self.error_per_head.mean())

    @property
    def flops(self) -> int:
        """Of attention: 2 (D + Dv) per pair, and 2 D per routing product."""
        return 2 * sum(self.head_dims) * self.pairs.total + 2 * self.head_dims[0] * self.routing_products

    @property
    def dense_flops(self) -> int:
        return 2 * sum(self.head_dims) * self.pairs.possible

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Everything that was changed or could not be kept."""
        if self.groups == (0, 0):
            every = "no rows or no keys are free to be routed: every pair was evaluated"
            return (*self.clamps, every) if self.pairs.possible else self.clamps
        # a head may be over its budget even if the mean over the heads is not
        over = self.per_head.total > self.target * self.per_head.possible.double() + 0.5
        if not int(over.sum()):
            return self.clamps
        where = f"in {int(over.sum())} of {over.numel()} heads (density {self.density:.4f} over all)"
        return (*self.clamps, f"density is above the target {self.target:g} {where}: {self.always}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        parts = ("routed", "probe", "pinned", "exact", "total", "possible")
        return {
            "target": self.target,
            "density": self.density,
            "densities": {part: self.pairs.density(part) for part in parts[:4]},
            "pairs": {part: getattr(self.pairs, part) for part in parts},
            "density_per_head": self.per_head.density().tolist(),
            "routing_products": self.routing_products,
            "flops": self.flops,
            "dense_flops": self.dense_flops,
            "error": self.error,
            "error_per_head": None if self.error_per_head is None else self.error_per_head.tolist(),
            "backend": self.backend,
            "warm": self.warm,
            "groups": list(self.groups),
            "notes": list(self.notes),
            "seconds": None if self.timings is None else dict(self.timings.seconds),
        }


def count_pairs(call: Call, route: Route | None, probes: int) -> Pairs:
    """Pairs per head [B, H]; without a route every free row was computed exactly."""
    heads = call.q.shape[:2]
    keys = valid_keys(call)[:, None].expand(heads)
    pinned = pinned_keys(call)[:, None].expand(heads)
    rows = call.q.shape[2]
    if route is None:
        nothing = torch.zeros_like(keys)
        return Pairs(nothing, nothing, nothing, rows * keys, rows * keys)
    free = route.kv.groups - route.pinned_groups
    routed = route.group_pairs[..., :free].sum(-1)
    beside = call.free_queries.count * pinned
    return Pairs(routed, probes * keys, beside, call.exact_queries.count * keys, rows * keys)


def write_receipt(
    call: Call,
    config: Config,
    backend: str,
    timings: Timings | None,
    *,
    route: Route | None = None,
    probes: int = 0,
    error: Tensor | None = None,
    warm: bool = False,
    notes: tuple[str, ...] = (),
) -> Receipt:
    """Counts what was done, without reading the device; no route means that every row was exact."""
    always = "every query group keeps at least one cell"
    if call.exact_queries.count or call.pinned_keys.count:
        always = "exact rows, pinned keys and one cell per query group are always evaluated"
    return Receipt(
        target=config.density,
        per_head=count_pairs(call, route, probes),
        error_per_head=error,
        routing_products=_routing_products(call, route, config),
        head_dims=(call.q.shape[3], call.v.shape[3]),
        groups=(0, 0) if route is None else (route.query.groups, route.kv.groups - route.pinned_groups),
        backend=backend,
        warm=warm,
        always=always,
        clamps=notes,
        timings=timings,
    )


def _routing_products(call: Call, route: Route | None, config: Config) -> int:
    """Products of query centroids with keys, or with key centroids."""
    if route is None or config.density == 1.0:
        return 0
    columns = call.k.shape[2] if config.score == "mass" else route.kv.groups
    return call.q.shape[0] * call.q.shape[1] * route.query.groups * columns


class Clock:
    """Time per stage when asked for; otherwise free of cost and of device synchronisation."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self._enabled = enabled
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if not self._enabled:
            yield
            return
        start = self._now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    @property
    def timings(self) -> Timings | None:
        return Timings(self._seconds) if self._enabled else None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

"""Every query-key pair of a call, counted; and the receipt that says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """What a call did: the pairs it evaluated, how far off it expects to be, and what it had to change."""

    target: float
    pairs: Pairs  # totals
    per_head: Pairs  # [B, H]
    routing_products: int  # anchor-key products of the router, not counted in the density
    flops: int  # of attention: 2 (D + Dv) per pair, and 2 D per routing product
    dense_flops: int
    error: float | None  # estimated mean relative row error from the probes; None without probes
    error_per_head: Tensor | None  # [B, H]
    backend: str
    warm: bool
    groups: tuple[int, int]  # query groups, K/V groups
    notes: tuple[str, ...] = ()
    timings: Timings | None = None

    @property
    def density(self) -> float:
        """Realised share of the pairs: routed cells, probes, pinned keys and exact rows."""
        return float(self.pairs.density())

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
    """Counts what was done; without a route, every row was computed exactly. This reads the device: a call
    without a receipt does not."""
    per_head = count_pairs(call, route, probes)
    pairs = per_head.sum()
    if route is None and pairs.possible:
        notes += ("no rows or no keys are free to be routed: every pair was evaluated",)
    elif route is not None:
        notes += _over_target(call, config.density, per_head)
    products = _routing_products(call, route, config)
    per_pair = 2 * (call.q.shape[3] + call.v.shape[3])
    return Receipt(
        target=config.density,
        pairs=pairs,
        per_head=per_head,
        routing_products=products,
        flops=per_pair * pairs.total + 2 * call.q.shape[3] * products,
        dense_flops=per_pair * pairs.possible,
        error=None if error is None else float(error.mean()),
        error_per_head=error,
        backend=backend,
        warm=warm,
        groups=(0, 0) if route is None else (route.query.groups, route.kv.groups - route.pinned_groups),
        notes=notes,
        timings=timings,
    )


def _routing_products(call: Call, route: Route | None, config: Config) -> int:
    """Products of query centroids with keys, or with key centroids."""
    if route is None or config.density == 1.0:
        return 0
    columns = call.k.shape[2] if config.score == "mass" else route.kv.groups
    return call.q.shape[0] * call.q.shape[1] * route.query.groups * columns


def _over_target(call: Call, target: float, per_head: Pairs) -> tuple[str, ...]:
    """A note if some head had to spend more than its budget, even if the mean over the heads did not."""
    heads = int((per_head.total > target * per_head.possible.double() + 0.5).sum())
    if not heads:
        return ()
    reason = "every query group keeps at least one cell"
    if call.exact_queries.count or call.pinned_keys.count:
        reason = "exact rows, pinned keys and one cell per query group are always evaluated"
    density = per_head.sum().density()
    where = f"in {heads} of {per_head.total.numel()} heads (density {density:.4f} over all)"
    return (f"density is above the target {target:g} {where}: {reason}",)


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

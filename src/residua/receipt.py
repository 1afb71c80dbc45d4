"""Counts the query-key pairs of a call and writes its receipt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .config import Config
from .types import Call, Choice, Route
from .util import json_text
from .util.stopwatch import Timings

MAX_BESIDE = 0.6  # a receipt has a note if work other than pairs is more than this share of the cost
LARGE_ERROR = 0.2  # an estimated error above this is noted in a receipt, and logged after a run
ALWAYS = "exact rows, pinned keys and one cell per query group are always evaluated"


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
        """All evaluated pairs."""
        return self.routed + self.probe + self.pinned + self.exact

    def density(self, part: str = "total") -> Any:
        """A part as a share of the possible pairs; 0 where nothing is possible.

        Args:
            part: "routed", "probe", "pinned", "exact" or "total".

        Returns:
            A number, or [B, H] fp64 if the pairs are per head.
        """
        value = getattr(self, part)
        if isinstance(self.possible, Tensor):
            return value.double() / self.possible.clamp(min=1)
        return value / self.possible if self.possible else 0.0

    def sum(self) -> Pairs:
        """The totals over batch and heads."""
        return Pairs(*(int(t.sum()) for t in (self.routed, self.probe, self.pinned, self.exact, self.possible)))


@dataclass(frozen=True, eq=False)
class Receipt:
    """What a call did: the pairs it evaluated, its total cost, its estimated error, what its heads chose, and
    which settings it had to change.

    The counts stay on the device until they are read, so that a receipt does not make a GPU wait.
    """

    target: float  # `Config.density`
    all_in: bool  # whether the target density covers the work in `beside` as well
    allowed: Tensor  # [B, H], the density that each head was allowed to spend
    per_head: Pairs  # [B, H]
    beside: Mapping[str, Tensor]  # [B, H] each: work other than pairs, in pair equivalents (D + Dv products)
    error_per_head: Tensor | None  # [B, H], estimated mean relative row error; None without probes
    choice_per_head: Tensor | None  # [B, H] of `residua.types.Choice`; None if heads have no choice
    head_dims: tuple[int, int]  # D, Dv
    groups: tuple[int, int]  # query groups, K/V groups; (0, 0) if every pair was evaluated
    backend: str  # the name of the backend that ran the call
    warm: bool  # whether it started from the groups of the call before
    reused_per_head: Tensor | None  # [B, Hkv] bool, heads that kept the groups of the call before; None: none
    always: str  # which pairs are evaluated whatever the target is
    clamps: tuple[str, ...] = ()  # settings that were changed to fit the call
    timings: Timings | None = None  # with `time_stages=True`
    probe_rows: Tensor | None = None  # [B, H, M], the rows that were computed exactly as probes

    @cached_property
    def pairs(self) -> Pairs:
        """Totals over batch and heads."""
        return self.per_head.sum()

    @property
    def density(self) -> float:
        """Realised share of the pairs: routed cells, probes, pinned keys and exact rows."""
        return float(self.pairs.density())

    @cached_property
    def costs(self) -> dict[str, float]:
        """Every kind of work as a share of dense attention: exact pairs, router, summary and so on. Grouping
        is not included: it is reported as time."""
        pairs = {part: self.pairs.density(part) for part in ("routed", "probe", "pinned", "exact")}
        possible = max(1, self.pairs.possible)
        return pairs | {name: float(work.sum()) / possible for name, work in self.beside.items()}

    @property
    def cost(self) -> float:
        """The sum of `costs`: the whole call as a share of dense attention."""
        return sum(self.costs.values())

    @cached_property
    def chosen(self) -> dict[str, int]:
        """How many heads made each choice."""
        if self.choice_per_head is None:
            return {}
        counts = self.choice_per_head.flatten().bincount(minlength=len(Choice)).tolist()
        return {choice.label: count for choice, count in zip(Choice, counts, strict=True)}

    @cached_property
    def error(self) -> float | None:
        """Estimated mean relative row error over all heads, from the probes; None without probes."""
        return None if self.error_per_head is None else float(self.error_per_head.mean())

    @cached_property
    def reused(self) -> float:
        """Share of the heads that kept the groups of the call before."""
        return 0.0 if self.reused_per_head is None else float(self.reused_per_head.double().mean())

    @property
    def routing_products(self) -> int:
        """Products of anchors with keys, or with key centroids, that the router computed."""
        if "routing" not in self.beside:
            return 0
        dim, value_dim = self.head_dims
        return round(float(self.beside["routing"].sum()) * (dim + value_dim) / dim)

    @property
    def flops(self) -> int:
        """FLOPs of attention: 2 (D + Dv) per pair or pair equivalent, 2 D per routing product."""
        beside = sum(float(work.sum()) for work in self.beside.values())
        return round(2 * sum(self.head_dims) * (self.pairs.total + beside))

    @property
    def dense_flops(self) -> int:
        """FLOPs of dense attention of this call."""
        return 2 * sum(self.head_dims) * self.pairs.possible

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Every setting that was changed, and every target that was missed."""
        if self.groups == (0, 0):
            every = "no rows or no keys are free to be routed: every pair was evaluated"
            return (*self.clamps, every) if self.pairs.possible else self.clamps
        budget, share, choice = self._budget_notes(), self._share_notes(), self._choice_notes()
        return (*self.clamps, *budget, *share, *choice, *self._error_notes())

    def _budget_notes(self) -> tuple[str, ...]:
        # checked per head: one head can be over its budget while the mean is not
        spent = self.per_head.total.double()
        if self.all_in:
            spent = spent + sum(self.beside.values(), torch.zeros_like(spent))
        over = spent > self.allowed * self.per_head.possible.double() + 0.5
        if self.choice_per_head is not None:
            over &= self.choice_per_head != Choice.DENSE  # dense heads have a note of their own
        if not int(over.sum()):
            return ()
        where = f"in {int(over.sum())} of {over.numel()} heads (density {self.density:.4f} over all)"
        return (f"density is above the target {self.target:g} {where}: {self.always}",)

    def _share_notes(self) -> tuple[str, ...]:
        beside = self.cost - self.density
        if not self.all_in or beside <= MAX_BESIDE * self.cost:
            return ()
        return (
            f"work beside the exact pairs takes {beside / self.cost:.0%} of the cost: for a call this short "
            "at this density a concentrated head may do better with reconstruction='none'",
        )

    def _choice_notes(self) -> tuple[str, ...]:
        told = {
            Choice.PLAIN: "run without a summary of what they skip: they are so concentrated, or the call so "
            "short, that its cost is better spent on pairs",
            Choice.DENSE: "ran dense: their estimated error is above max_error with all they may spend, or "
            "far above it",
        }
        total = sum(self.chosen.values())
        return tuple(
            f"{self.chosen[choice.label]} of {total} heads {why}"
            for choice, why in told.items()
            if self.chosen.get(choice.label)
        )

    def _error_notes(self) -> tuple[str, ...]:
        if self.error is None or not self.error > LARGE_ERROR:
            return ()
        return (
            f"the estimated error {self.error:.2f} is large: spend more (density), set a bound (max_error), "
            "or leave this call dense; unstructured inputs, such as random noise, cannot be summarised",
        )

    def __str__(self) -> str:
        """One line: cost, estimated error, backend."""
        error = "no error estimate" if self.error is None else f"estimated error {self.error:.4f}"
        count = len(self.notes)
        notes = f", {count} {'note' if count == 1 else 'notes'}" if count else ""
        return f"Receipt: cost {self.cost:.1%} of dense, {error}, backend {self.backend}{notes}"

    def __eq__(self, other: object) -> bool:
        """Equal if everything except the timings is equal."""
        return isinstance(other, Receipt) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> str:
        facts = {name: value for name, value in self.to_dict().items() if name != "seconds"}
        return repr(facts)  # as text, because NaN does not equal NaN

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for numbers that are not finite."""
        parts = ("routed", "probe", "pinned", "exact", "total", "possible")
        told = {
            "target": self.target,
            "density": self.density,
            "cost": self.cost,
            "costs": self.costs,
            "chosen": self.chosen,
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
            "reused": self.reused,
            "groups": list(self.groups),
            "notes": list(self.notes),
            "seconds": None if self.timings is None else dict(self.timings.seconds),
        }
        return json_text.finite_only(told)

    def to_json(self, indent: int | None = 2) -> str:
        """The receipt as JSON.

        Args:
            indent: Spaces per level; None: one line.

        Returns:
            The text of `to_dict`.
        """
        return json_text.dumps(self.to_dict(), indent)


def count_pairs(call: Call, route: Route | None, probes: int) -> Pairs:
    """Pairs per head [B, H]; no route means that every free row was computed exactly."""
    heads = call.q.shape[:2]
    keys = call.valid_keys[:, None].expand(heads)
    pinned = call.valid_pinned_keys[:, None].expand(heads)
    rows = call.q.shape[2]
    if route is None:
        nothing = torch.zeros_like(keys)
        return Pairs(nothing, nothing, nothing, rows * keys, rows * keys)
    free = route.kv.groups - route.pinned_groups
    routed = route.group_pairs[..., :free].sum(-1)
    beside = call.free_queries.count * pinned
    return Pairs(routed, probes * keys, beside, call.exact_queries.count * keys, rows * keys)


@dataclass(frozen=True)
class Outcome:
    """What a sparse call did, for its receipt."""

    route: Route
    probe_rows: Tensor | None  # [B, H, M], rows that were computed exactly; None: no probes
    allowed: Tensor  # [B, H] fp64, the density that each head was allowed to spend
    costs: Callable[[], Mapping[str, Tensor]]  # [B, H] each: work other than pairs, in pair equivalents
    error: Tensor | None  # [B, H], estimated
    choice: Tensor | None  # [B, H] of `Choice`
    warm: bool
    reused: Tensor | None  # [B, Hkv] bool
    notes: tuple[str, ...]


def write_receipt(
    call: Call, config: Config, backend: str, timings: Timings | None, outcome: Outcome | None
) -> Receipt:
    """Counts what was done without waiting for the device; no outcome means that every row was exact."""
    always = "every query group keeps at least one cell"
    if call.exact_queries.count or call.pinned_keys.count:
        always = ALWAYS
    route = None if outcome is None else outcome.route
    probe_rows = None if outcome is None else outcome.probe_rows
    pairs = count_pairs(call, route, 0 if probe_rows is None else probe_rows.shape[-1])
    everything = torch.ones_like(pairs.possible, dtype=torch.float64)
    return Receipt(
        target=config.density,
        all_in=config.summarises,
        allowed=everything if outcome is None else outcome.allowed,
        per_head=pairs,
        beside={} if outcome is None else dict(outcome.costs()),
        error_per_head=None if outcome is None else outcome.error,
        choice_per_head=None if outcome is None else outcome.choice,
        head_dims=(call.q.shape[3], call.v.shape[3]),
        groups=(0, 0) if route is None else (route.query.groups, route.kv.groups - route.pinned_groups),
        backend=backend,
        warm=False if outcome is None else outcome.warm,
        reused_per_head=None if outcome is None else outcome.reused,
        always=always,
        clamps=() if outcome is None else outcome.notes,
        timings=timings,
        probe_rows=probe_rows,
    )

"""What a call did: its query-key pairs, its cost, its error, and notes about what it had to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
CHOICE_NOTES = {
    Choice.WITHOUT_SUMMARY: "run without a summary of what they skip: they are so concentrated, or the call so "
    "short, that its cost is better spent on pairs",
    Choice.DENSE: "ran dense: their estimated error is above max_error with all they may spend, or far above it",
}


class Note(str):
    """A sentence about a call. Notes of one `kind` say the same with other numbers."""

    kind: str  # the sentence with `...` for what was measured in this call

    def __new__(cls, sentence: str, *measured: object) -> Note:
        """Args:
        sentence: With `{}` for every measured value.
        measured: The values.
        """
        note = super().__new__(cls, sentence.format(*measured) if measured else sentence)
        note.kind = sentence.replace("{}", "...")
        return note


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
    allowed: Tensor  # [B, H] fp64, the density that each head was allowed to spend
    per_head: Pairs  # [B, H]
    head_dims: tuple[int, int]  # D, Dv
    backend: str  # the name of the backend that ran the call
    always: str = ALWAYS  # which pairs are evaluated whatever the target is
    timings: Timings | None = None  # with `time_stages=True`
    groups: tuple[int, int] = (0, 0)  # query groups, K/V groups; (0, 0) if every pair was evaluated
    # [B, H] each: work other than pairs, in pair equivalents (D + Dv products)
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    probe_rows: Tensor | None = None  # [B, H, M], the rows that were computed exactly as probes
    error_per_head: Tensor | None = None  # [B, H], estimated mean relative row error; None without probes
    choice_per_head: Tensor | None = None  # [B, H] of `residua.types.Choice`; None if heads have no choice
    reused_per_head: Tensor | None = None  # [B, Hkv] bool, heads that kept the groups of the call before; None: none
    warm: bool = False  # whether it started from the groups of the call before
    clamps: tuple[Note, ...] = ()  # settings that were changed to fit the call

    @classmethod
    def of(
        cls,
        call: Call,
        config: Config,
        backend: str,
        timings: Timings | None,
        route: Route | None = None,
        allowed: Tensor | None = None,
        probe_rows: Tensor | None = None,
        **fields: Any,
    ) -> Receipt:
        """Counts what a call did, without waiting for the device.

        Args:
            call: The call.
            config: Its settings.
            backend: The name of the backend that ran it.
            timings: If its stages were timed.
            route: The cells that were evaluated; None: every row was computed exactly.
            allowed: The density that each head was allowed to spend; None: all of it.
            probe_rows: Rows that were computed exactly as probes, if any.
            **fields: Further fields, by name.

        Returns:
            The receipt.
        """
        pairs = count_pairs(call, route, 0 if probe_rows is None else probe_rows.shape[-1])
        text = call.exact_queries.count or call.pinned_keys.count
        return cls(
            target=config.density,
            all_in=config.summarises,
            allowed=torch.ones_like(pairs.possible, dtype=torch.float64) if allowed is None else allowed,
            per_head=pairs,
            head_dims=(call.q.shape[3], call.v.shape[3]),
            backend=backend,
            always=ALWAYS if text else "every query group keeps at least one cell",
            timings=timings,
            groups=(0, 0) if route is None else (route.query.groups, route.kv.groups - route.pinned_groups),
            probe_rows=probe_rows,
            **fields,
        )

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
    def notes(self) -> tuple[Note, ...]:
        """Every setting that was changed, and every target that was missed."""
        return (*self.clamps, *self._targets_missed())

    def _targets_missed(self) -> Iterator[Note]:
        if self.groups == (0, 0):
            if self.pairs.possible:
                yield Note("no rows or no keys are free to be routed: every pair was evaluated")
            return
        heads = self._heads_above_target()
        if heads:
            where = f"in {{}} of {self.allowed.numel()} heads (density {{}} over all)"
            sentence = f"density is above the target {{}} {where}: {self.always}"
            yield Note(sentence, f"{self.target:g}", heads, f"{self.density:.4f}")
        beside = self.cost - self.density
        if self.all_in and beside > MAX_BESIDE * self.cost:
            yield Note(
                "work beside the exact pairs takes {} of the cost: for a call this short at this density a "
                "concentrated head may do better with reconstruction='none'",
                f"{beside / self.cost:.0%}",
            )
        for choice, why in CHOICE_NOTES.items():
            if self.chosen.get(choice.label):
                yield Note(f"{{}} of {sum(self.chosen.values())} heads {why}", self.chosen[choice.label])
        if self.error is not None and self.error > LARGE_ERROR:
            yield Note(
                "the estimated error {} is large: spend more (density), set a bound (max_error), or leave this "
                "call dense; unstructured inputs, such as random noise, cannot be summarised",
                f"{self.error:.2f}",
            )

    def _heads_above_target(self) -> int:
        """One head can be over its budget while the mean is not."""
        spent = self.per_head.total.double()
        if self.all_in:
            spent = spent + sum(self.beside.values(), torch.zeros_like(spent))
        over = spent > self.allowed * self.per_head.possible.double() + 0.5
        if self.choice_per_head is not None:
            over &= self.choice_per_head != Choice.DENSE  # dense heads have a note of their own
        return int(over.sum())

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
        facts = {
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
        return json_text.finite_only(facts)

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

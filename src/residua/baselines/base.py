"""What a rival is: a training-free method that computes one attention call within a budget of query-key
pairs.

The accounting is the same for all. A *pair* is a query row times a key, evaluated exactly and used in the
softmax; its share of all pairs is the density, and no rival may exceed the target. All other products of
head-dim vectors (scores of blocks, centroids in place of keys, distances of k-means) are counted separately:
reported, not charged. A method that is `all_in` is charged for them too, except for grouping.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..config import Config
from ..errors import InputError
from ..method.inputs import validate
from ..method.sizes import default_groups
from ..ops.backend import Backend, Demand
from ..ops.select import choose_backend
from ..registry import Registry
from ..types import Call, Partition, Route
from ..util.stopwatch import Stopwatch


@dataclass(frozen=True)
class Task:
    """One call for all rivals: the same tensors, budget, group counts and attention backend."""

    q: Tensor  # [B, H, Nq, D] fp32
    k: Tensor  # [B, H, Nk, D] fp32
    v: Tensor  # [B, H, Nk, Dv] fp32
    density: float
    scale: float
    grid: tuple[int, ...] | None = None  # of the tokens, row-major; None if they have no positions
    groups: tuple[int, int] | None = None  # query groups, K/V groups; None: Residua's defaults
    backend_name: str = "auto"
    stopwatch: Stopwatch | None = None  # for the time of each stage; None: not measured
    centres: dict[str, Tensor] | None = None  # from an earlier call, by name; updated for a later one

    def __post_init__(self) -> None:
        Config(density=self.density)  # refuses an invalid density
        if self.q.shape[1] != self.k.shape[1]:
            raise InputError(f"{self.q.shape[1]} heads, {self.k.shape[1]} K/V heads: repeat the K/V heads")

    @cached_property
    def call(self) -> Call:
        return validate(self.q, self.k, self.v, scale=self.scale)

    @cached_property
    def backend(self) -> Backend:
        return choose_backend(self.backend_name, Demand.of(self.call))

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time spent inside counts for this stage, if it is measured."""
        return nullcontext() if self.stopwatch is None else self.stopwatch.stage(name)

    def start(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Centres of that name from an earlier call, if they have this shape; None: start cold."""
        found = None if self.centres is None else self.centres.get(name)
        return found if found is not None and found.shape == shape else None

    def leave(self, name: str, centres: Tensor) -> None:
        """Stores centres for a later call, if there will be one."""
        if self.centres is not None:
            self.centres[name] = centres

    @property
    def heads(self) -> int:
        """Batch times heads."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def rows(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def possible(self) -> int:
        """Pairs of dense attention, over all heads."""
        return self.heads * self.rows * self.keys

    @property
    def budget(self) -> Tensor:
        """Pairs that a head may evaluate.  # [B, H] int64"""
        pairs = int(self.density * self.rows * self.keys)
        return torch.full(self.q.shape[:2], pairs, dtype=torch.long, device=self.q.device)

    @property
    def group_counts(self) -> tuple[int, int]:
        """Query and K/V groups, the same for all rivals, so that none has finer groups than another."""
        query, kv = self.groups or default_groups(self.rows, self.keys)
        return min(query, self.rows), min(kv, self.keys)

    def attend(self, route: Route) -> tuple[Tensor, Tensor]:
        """Exact attention over the kept cells -> output [B, H, Nq, Dv] fp32, log-sum-exp [B, H, Nq]."""
        with self.stage("attention"):
            return self.backend.attend(self.q, self.k, self.v, route, self.scale, out_dtype=torch.float32)

    def means(self, query: Partition, kv: Partition) -> tuple[Tensor, Tensor]:
        """Centroids of query and key groups.  # [B, H, Cq, D], [B, H, Ck, D]"""
        return self.backend.group_means(self.q, query), self.backend.group_means(self.k, kv)


@dataclass(frozen=True)
class Outcome:
    """What a rival computed and what it spent, over all heads."""

    out: Tensor  # [B, H, Nq, Dv] fp32
    pairs: dict[str, int]  # exact pairs by purpose: routed, probe
    products: dict[str, int] = field(default_factory=dict)  # others: prediction, compensation, grouping
    route: Route | None = None  # the cells behind the routed pairs
    lse: Tensor | None = None  # [B, H, Nq] log-sum-exp over the routed pairs alone
    added_lse: Tensor | None = None  # [B, H, Nq] log of the mass that a compensation added
    probe_rows: Tensor | None = None  # [B, H, M] rows that were computed exactly to learn from

    @property
    def total_lse(self) -> Tensor:
        """Log of the mass that the output stands for, so that further keys can be added.  # [B, H, Nq]"""
        assert self.lse is not None
        return self.lse if self.added_lse is None else torch.logaddexp(self.lse, self.added_lse)

    @property
    def executed(self) -> int:
        return sum(self.pairs.values())

    @staticmethod
    def routed(
        out: Tensor, lse: Tensor, route: Route, products: dict[str, int], added_lse: Tensor | None = None
    ) -> Outcome:
        """The outcome of a method whose exact pairs are exactly its cells."""
        return Outcome(out, {"routed": int(route.pairs.sum())}, products, route, lse, added_lse)


class Rival:
    """Base class of the rivals. A new one is a class with `@register`, in a file of its own."""

    name: ClassVar[str]  # as on the command line
    title: ClassVar[str]  # as in a table
    source: ClassVar[str]  # whose idea it is, and where it is described
    simplified: ClassVar[str] = "nothing"  # what this implementation leaves out of that description
    all_in: ClassVar[bool] = False  # whether the target also covers products other than pairs
    reference: ClassVar[bool] = False  # not a usable method: dense attention, the oracle

    def refuses(self, task: Task) -> str | None:
        """Why this method cannot compute the call, or None."""
        return None

    def run(self, task: Task) -> Outcome:
        raise NotImplementedError


RIVALS: Registry[Rival] = Registry("rival")
register = RIVALS.register
RENAMED = {"spargeattn": "sparge", "spargeattn-gate": "sparge-gate", "sparsepr": "paper"}


def find(names: list[str] | None) -> list[Rival]:
    """The rivals of these names, in their order; all if no names are given."""
    unknown = [name for name in names or [] if name not in RIVALS]
    for name in unknown:
        if name in RENAMED:
            raise InputError(f"method {name} is now called {RENAMED[name]}")
    if unknown:
        raise InputError(f"no method {', '.join(unknown)}; there are: {', '.join(RIVALS)}")
    return [RIVALS[name] for name in dict.fromkeys(names or RIVALS)]

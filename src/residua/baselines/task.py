"""The video tokens of one attention call, as every method gets them, and what a method made of them.

The accounting is the same for all. A *pair* is a query row times a key, evaluated exactly and used in the softmax; its
share of all pairs is the density, and no method may exceed the target. All other products of head-dim vectors (scores
of blocks, centroids in place of keys, distances of k-means) are counted separately: reported, not charged. A method
that is `all_in` is charged for them too, except for grouping.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from ..config import Config
from ..errors import InputError
from ..method.inputs import validate
from ..method.sizes import default_groups
from ..ops.backend import Backend, Demand
from ..ops.select import choose_backend
from ..types import Call, Partition, Route
from ..util.stopwatch import Stopwatch

CHUNK = 1 << 22  # logits at a time


@dataclass(frozen=True)
class Task:
    """One call for all methods: the same tensors, budget, group counts and attention backend."""

    q: Tensor  # [B, H, Nq, D] fp32
    k: Tensor  # [B, H, Nk, D] fp32
    v: Tensor  # [B, H, Nk, Dv] fp32
    config: Config  # density, group counts and backend are for all methods, the rest for Residua's own
    scale: float
    grid: tuple[int, ...] | None = None  # of the tokens, row-major; None if they have no positions
    stopwatch: Stopwatch | None = None  # for the time of each stage; None: not measured
    centres: dict[str, Tensor] | None = None  # from an earlier call, by name; updated for a later one

    def __post_init__(self) -> None:
        if self.q.shape[1] != self.k.shape[1]:
            raise InputError(f"{self.q.shape[1]} heads, {self.k.shape[1]} K/V heads: repeat the K/V heads")

    @cached_property
    def call(self) -> Call:
        return validate(self.q, self.k, self.v, scale=self.scale)

    @cached_property
    def backend(self) -> Backend:
        return choose_backend(self.config.backend, Demand.of(self.call))

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
    def each_head(self) -> Iterator[tuple[int, int]]:
        """Batch and head."""
        return product(range(self.q.shape[0]), range(self.q.shape[1]))

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
        pairs = int(self.config.density * self.rows * self.keys)
        return torch.full(self.q.shape[:2], pairs, dtype=torch.long, device=self.q.device)

    @property
    def group_counts(self) -> tuple[int, int]:
        """Query and K/V groups, the same for all methods, so that none has finer groups than another."""
        query, kv = default_groups(self.rows, self.keys)
        return min(self.config.query_groups or query, self.rows), min(self.config.kv_groups or kv, self.keys)

    def on_equal_terms(self, config: Config) -> Config:
        """The config with the groups and probes of this task instead of its own."""
        query_groups, kv_groups = self.group_counts
        mine = {"metric_spacing": self.config.metric_spacing, "probes": self.config.probes}
        return config.replace(query_groups=query_groups, kv_groups=kv_groups, **mine)

    def strips(self, rows: int, width: int) -> Iterator[tuple[int, int, slice]]:
        """Batch, head and a few rows at a time, whose products with `width` columns fit into memory."""
        step = max(1, CHUNK // width)
        for batch, head in self.each_head:
            for first in range(0, rows, step):
                yield batch, head, slice(first, first + step)

    def attend(self, route: Route) -> tuple[Tensor, Tensor]:
        """Exact attention over the kept cells -> output [B, H, Nq, Dv] fp32, log-sum-exp [B, H, Nq]."""
        with self.stage("attention"):
            return self.backend.attend(self.q, self.k, self.v, route, self.scale, out_dtype=torch.float32)

    def means(self, query: Partition, kv: Partition) -> tuple[Tensor, Tensor]:
        """Centroids of query and key groups.  # [B, H, Cq, D], [B, H, Ck, D]"""
        return self.backend.group_means(self.q, query), self.backend.group_means(self.k, kv)


@dataclass(frozen=True)
class Outcome:
    """What a method computed and what it spent, over all heads."""

    out: Tensor  # [B, H, Nq, Dv] fp32
    pairs: dict[str, int]  # exact pairs by purpose: routed, probe
    products: dict[str, int] = field(default_factory=dict)  # others: prediction, compensation, grouping
    route: Route | None = None  # the cells behind the routed pairs
    lse: Tensor | None = None  # [B, H, Nq] log-sum-exp over the routed pairs alone
    added_lse: Tensor | None = None  # [B, H, Nq] log of the mass that a compensation added
    probe_rows: Tensor | None = None  # [B, H, M] rows that were computed exactly to learn from
    all_in: bool = False  # whether the target also covers products other than pairs

    @property
    def total_lse(self) -> Tensor:
        """Log of the mass that the output stands for, so that further keys can be added.  # [B, H, Nq]"""
        assert self.lse is not None
        return self.lse if self.added_lse is None else torch.logaddexp(self.lse, self.added_lse)

    @property
    def executed(self) -> int:
        return sum(self.pairs.values())


def attend_all(backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every row against every key, without the whole map in memory -> output fp32, log-sum-exp."""
    query, kv = (Partition.from_labels(torch.zeros(*x.shape[:3], dtype=torch.long, device=x.device), 1) for x in (q, k))
    cells = torch.ones(*q.shape[:2], 1, 1, dtype=torch.bool, device=q.device)
    return backend.attend(q, k, v, Route(query, kv, cells), scale, out_dtype=torch.float32)

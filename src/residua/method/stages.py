"""What the stages of a call hand on: each takes one of these and the results before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..config import Config
from ..ops.backend import Backend
from ..types import Call, Grouping, HeadCost, Probes, Route, SummaryKeys
from .rules import Rules, choose_rules
from .sizes import Sizes, resolve


@dataclass(frozen=True)
class SizedCall:
    """A call whose rules and sizes are settled: what budget and grouping start from."""

    call: Call
    config: Config
    rules: Rules
    sizes: Sizes
    backend: Backend

    @staticmethod
    def of(call: Call, config: Config, backend: Backend) -> SizedCall:
        rules = choose_rules(config, call)
        return SizedCall(call, config, rules, resolve(config, call, rules), backend)

    @cached_property
    def keys(self) -> Tensor:
        """Keys that are not padding.  # [B, 1] fp64"""
        return self.call.valid_keys[:, None].double()

    @property
    def key_count(self) -> Tensor | float:
        """`keys`; a number where the shapes tell, so that a GPU launches nothing for it."""
        return float(self.call.k.shape[2]) if self.call.key_mask is None else self.keys

    def price(self, cost: HeadCost) -> Tensor | float:
        """What that work costs a head of this call."""
        return cost.fixed + cost.per_key * self.key_count

    @property
    def groups(self) -> tuple[int, int]:
        """Query groups and K/V groups, pinned ones included."""
        return self.sizes.query_groups, self.sizes.kv_groups + int(self.call.pinned_keys.count > 0)

    def grouped(self, grouping: Grouping, allowed: Tensor | None = None) -> GroupedCall:
        """The call with its tokens in groups.

        allowed [B, H] fp64: the density that each head may spend; None: that of the config
        """
        if allowed is None:
            q = self.call.q
            allowed = torch.full(q.shape[:2], self.config.density, dtype=torch.float64, device=q.device)
        return GroupedCall(self.call, self.config, self.rules, self.sizes, self.backend, grouping, allowed)


@dataclass(frozen=True)
class GroupedCall(SizedCall):
    """A call whose tokens are in groups: what every later stage starts from."""

    grouping: Grouping
    allowed: Tensor  # [B, H] fp64, the density that each head may spend


@dataclass(frozen=True)
class Centres:
    """One key for each K/V group, which has the group's mass for a query q: log_size + scale * q . key."""

    keys: Tensor  # [B, Hkv, Ck, D] fp32
    values: Tensor  # [B, Hkv, Ck, Dv] fp32
    log_size: Tensor  # [B, Hkv, Ck] fp32, -inf for an empty group


@dataclass(frozen=True)
class Scatter:
    """How far queries are from their anchors, and keys from their centroids: second moments, from samples."""

    queries: Tensor  # [B, H, D, D] fp64
    keys: Tensor  # [B, Hkv, D, D] fp64

    def of_scores(self, scale: float) -> Tensor:
        """Variance of what an expansion leaves out to first order: the score between a row's distance from its
        anchor and a key's distance from its centroid.  # [B, H] fp64"""
        keys = self.keys.repeat_interleave(self.queries.shape[1] // self.keys.shape[1], dim=1)
        return scale**2 * (self.queries * keys).sum((-2, -1))


@dataclass(frozen=True)
class Routing:
    """The cells that a budget bought, and what the router measured to choose them."""

    route: Route
    log_mass: Tensor | None = None  # [B, H, Cq, Ck] as from `cell_scores`; None if nothing may be skipped
    without_summary: Tensor | None = None  # [B, H] bool, heads that spend the cost of a summary on pairs instead
    centres: Centres | None = None  # of the K/V groups, if their masses come from these
    scatter: Scatter | None = None  # how far tokens are from the middle of their groups; None: not looked at


@dataclass(frozen=True)
class Slots:
    """Slot `index[a, b]` of query group a stands for K/V group b, among others; -1: b is kept, or empty."""

    index: Tensor  # [B, H, Cq, Ck] int32
    log_mass: Tensor  # [B, H, Cq, T] fp32, of all keys in the slot at the anchor; -inf where it is empty
    share: Tensor  # [B, H, Cq, Ck] fp32, of the skipped mass of query group a; 0 where b is not skipped
    near: Tensor  # [B, Hkv, Ck] int64: a group that has no slot of its own is in slot `single + near`
    single: int  # slots below hold one K/V group each


@dataclass(frozen=True)
class Verdict:
    """What the kernel will compute, after some rows were computed exactly."""

    route: Route
    summary: SummaryKeys | None = None
    probes: Probes | None = None
    choice: Tensor | None = None  # [B, H] int64 of `Choice`; None if heads have no choice
    error: Tensor | None = None  # [B, H] fp32, estimated before the kernel runs
    sparse_error: Tensor | None = None  # [B, H] fp32, the same, but of dense heads as if they were not
    costs: Callable[[], Mapping[str, Tensor]] = dict  # [B, H] each: work of judging, in pairs; if asked

"""What a reconstruction is: what stands for the query-key pairs that a call skips.

A reconstruction is a class with a few verbs, called in turn by `attention.py`: `route` chooses the cells to
compute exactly, `summarise` describes what is skipped, `judge` computes some rows exactly, `finish` corrects
the kernel's output. A new one is a class with `@RECONSTRUCTIONS.register`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...config import RECONSTRUCTION_TRAITS, Config, Traits
from ...ops.backend import Backend
from ...receipt import Note
from ...registry import Registry
from ...types import Call, Grouping, HeadCost, Probes, Route, SummaryKeys
from ..route import cell_scores, keep_all, keep_best, pair_budget, routing_cost
from ..sizes import Sizes

if TYPE_CHECKING:
    from .centres import Centres
    from .expansion import Scatter


@dataclass(frozen=True)
class GroupedCall:
    """A call whose tokens are in groups: what every later stage starts from."""

    call: Call
    config: Config
    sizes: Sizes
    grouping: Grouping
    allowed: Tensor  # [B, H] fp64, the density that each head may spend
    backend: Backend
    floor: Tensor | None = None  # [B, H] fp64, the least density of use to a head, if a budget moves with it

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
        """Query groups and K/V groups."""
        return self.grouping.query.groups, self.grouping.kv.groups


@dataclass(frozen=True)
class Routing:
    """The cells that a budget bought, and what the router measured to choose them."""

    route: Route
    log_mass: Tensor | None = None  # [B, H, Cq, Ck] as from `cell_scores`; None if nothing may be skipped
    bare: Tensor | None = None  # [B, H] bool, heads that spend the cost of a summary on pairs instead
    centres: Centres | None = None  # of the K/V groups, if their masses come from these
    scatter: Scatter | None = None  # how far tokens are from the middle of their groups; None: not looked at


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


class Reconstruction:
    """The base reconstructs nothing: what is skipped is dropped."""

    name: ClassVar[str] = "none"
    about: ClassVar[str] = "drop what is skipped"
    probe_policy: ClassVar[str | None] = None  # how its probe rows are placed; None: it takes none
    all_in: ClassVar[bool] = False  # whether `density` pays for everything, not for exact pairs alone

    def affordable(self, grouped: GroupedCall) -> tuple[Reconstruction, tuple[Note, ...]]:
        """The reconstruction that the budget of this call can pay for.

        Returns:
            This one or a cheaper one, and notes for the receipt if it is another.
        """
        return self, ()

    def routing_cost(self, grouped: GroupedCall) -> HeadCost:
        """What scoring the cells costs."""
        return routing_cost(grouped.call, grouped.config.score, grouped.groups)

    def route(self, grouped: GroupedCall) -> Routing:
        """Spends the pair budget of every head on its best cells."""
        call, grouping = grouped.call, grouped.grouping
        if grouped.config.skips_nothing:
            return Routing(keep_all(call, grouping))
        log_mass = cell_scores(call, grouping, grouped.config.score, grouped.backend)
        budget = pair_budget(call, grouped.allowed, grouped.sizes.probes)
        route = keep_best(call, grouping, log_mass, budget, grouped.config.budget_scope, grouped.backend)
        return Routing(route, log_mass)

    def summarise(self, grouped: GroupedCall, routing: Routing) -> SummaryKeys | None:
        """Keys and values that stand for the skipped groups in the softmax, or None."""
        return None

    def judge(self, grouped: GroupedCall, routing: Routing, summary: SummaryKeys | None) -> Verdict:
        """Computes the probe rows exactly, and lets heads choose by them what the kernel will do."""
        return Verdict(routing.route, summary)

    def finish(self, grouped: GroupedCall, verdict: Verdict, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Corrects the kernel's output.

        Returns:
            The output [B, H, Nq, Dv] in the call's dtype, and the estimated error [B, H] if there is one.
        """
        return out, verdict.error

    def costs(self, grouped: GroupedCall, routing: Routing) -> dict[str, Tensor]:
        """Work beside the exact pairs, in pair equivalents of D + Dv products.  # [B, H] each"""
        if routing.log_mass is None:
            return {}
        return {"routing": self.routing_cost(grouped).at(grouped.keys).expand_as(grouped.allowed)}

    def min_density(self, grouped: GroupedCall) -> Tensor | float:
        """The density, of the pairs that may be skipped, below which a budget leaves this reconstruction
        nothing to work with.

        -> [B, 1] fp64; a number where the shapes tell, so that a GPU launches nothing for it
        """
        return 0.0

    def output_dtype(self, grouped: GroupedCall) -> torch.dtype:
        """The dtype in which the kernel hands over its output."""
        return grouped.call.q.dtype

    def places_probes_by_coordinates(self, config: Config) -> bool:
        """Whether the probe rows are those in the middle of their groups."""
        return (config.probe_policy or self.probe_policy) == "stratified"

    def policy(self, config: Config) -> str:
        """How probe rows are placed: as the config says, or in this reconstruction's own way."""
        policy = config.probe_policy or self.probe_policy
        assert policy is not None, f"{self.name} takes no probes"
        return policy


class Reconstructions(Registry[Reconstruction]):
    """The registered reconstructions; a `Config` knows their names."""

    def add(self, one: Reconstruction) -> None:
        super().add(one)
        RECONSTRUCTION_TRAITS[one.name] = Traits(one.all_in, one.probe_policy is not None)

    def remove(self, name: str) -> None:
        super().remove(name)
        del RECONSTRUCTION_TRAITS[name]


RECONSTRUCTIONS = Reconstructions("reconstruction")
RECONSTRUCTIONS.register(Reconstruction)

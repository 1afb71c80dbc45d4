"""What a reconstruction is: what stands for the query-key pairs that a call skips.

A reconstruction is a class with a few verbs, called in turn by `attention.py`: `route` chooses the cells to
compute exactly, `summarise` describes what is skipped, `judge` computes some rows exactly, `finish` corrects
the kernel's output. A new one is a class with `@RECONSTRUCTIONS.register`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...config import RECONSTRUCTION_TRAITS, Config, Traits
from ...receipt import Note
from ...registry import Registry
from ...types import HeadCost, SummaryKeys
from ..route import cell_scores, keep_all, keep_best, pair_budget, routing_cost
from ..stages import GroupedCall, Routing, SizedCall, Verdict


class Reconstruction:
    """The base reconstructs nothing: what is skipped is dropped."""

    name: ClassVar[str] = "none"
    about: ClassVar[str] = "drop what is skipped"
    probe_policy: ClassVar[str | None] = None  # how its probe rows are placed; None: it takes none
    all_in: ClassVar[bool] = False  # whether `density` pays for everything, not for exact pairs alone

    def affordable(self, sized: SizedCall) -> tuple[Reconstruction, tuple[Note, ...]]:
        """The reconstruction that the budget of this call can pay for.

        Returns:
            This one or a cheaper one, and notes for the receipt if it is another.
        """
        return self, ()

    def routing_cost(self, sized: SizedCall) -> HeadCost:
        """What scoring the cells costs."""
        return routing_cost(sized.call, sized.config.score, sized.groups)

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

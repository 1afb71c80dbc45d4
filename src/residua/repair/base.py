"""What a repair is: it routes a call within its budget, may give the kernel a tail to attend to in place of
what is skipped, and may correct the output. A new one is a class with `@register`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..clock import Clock
from ..config import Config
from ..execution.backend import Backend
from ..routing import cell_scores, keep_all, keep_best, pair_budget
from ..sizing import Sizes
from ..types import Call, ExtraKeys, Grouping, Probes, Route

REPAIRS: dict[str, Repair] = {}


@dataclass(frozen=True)
class Work:
    """What every stage of a repair knows."""

    call: Call
    config: Config
    sizes: Sizes
    grouping: Grouping
    density: Tensor  # [B, H] fp64, what a head may spend
    backend: Backend
    clock: Clock


@dataclass(frozen=True)
class Plan:
    """What is computed exactly, and what stands for the rest."""

    route: Route
    probes: Probes | None = None
    tail: ExtraKeys | None = None
    error: Tensor | None = None  # [B, H], estimated before the call runs
    choices: tuple[str, ...] = ()  # what the repair chose from,
    choice: Tensor | None = None  # [B, H] int64, and what it chose
    costs: Mapping[str, Tensor] = field(default_factory=dict)  # beside the pairs, in pair equivalents [B, H]
    notes: tuple[str, ...] = ()


class Repair:
    """The base repairs nothing: what is skipped is dropped."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "drop what is skipped"
    probes: ClassVar[str | None] = None  # the policy that places its probe rows; None: it has none
    all_in: ClassVar[bool] = False  # whether `density` pays for everything, not for exact pairs alone

    def plan(self, work: Work) -> Plan:
        """Chooses the cells of a call."""
        return Plan(route(work, pair_budget(work.call, work.density, work.sizes.probes)))

    def finish(self, work: Work, plan: Plan, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output [B, H, Nq, Dv] in the call's dtype, and the estimated error [B, H] if there is one."""
        return out, plan.error

    def least_density(self, work: Work) -> float | Tensor:
        """Below which a budget leaves the repair nothing to work with."""
        return 0.0

    def working_dtype(self, work: Work) -> torch.dtype:
        """In which the output of the kernel is wanted."""
        return work.call.q.dtype


def register(repair: type[Repair]) -> type[Repair]:
    REPAIRS[repair.name] = repair()
    return repair


register(Repair)


def route(work: Work, budget: Tensor) -> Route:
    """The best cells within a budget [B, H] of pairs; all of them where nothing may be skipped."""
    call, grouping = work.call, work.grouping
    if work.config.density == 1.0 and work.config.max_error is None:
        return keep_all(call, grouping)
    with work.clock.stage("routing"):
        log_mass = cell_scores(call, grouping, work.config.score, work.backend)
        return keep_best(call, grouping, log_mass, budget, work.backend)

"""Repairs that attend to a summary of what is skipped: anchored reconstruction and its simple relative, the
tail.

Both choose before the call runs. A few rows that no fit has seen are computed exactly, once against every key
and once as the call would; their errors decide what each head does, and are its error estimate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..routing import cell_scores, keep_all, keep_best, pair_budget, valid_keys
from ..types import ExtraKeys, Grouping, Probes, Route
from .base import REPAIRS, Plan, Repair, Work, register
from .centroids import centroid_mass, merge
from .expansion import expand
from .fit import narrow, working_dtype
from .judge import Verdict, judge
from .slots import Slots, assign_slots

LEAN = (
    0.2  # a head whose skipped mass shrinks below this share if the tail's cost goes into pairs needs no tail
)
LEAST_PAIRS = 0.25  # of the budget without a tail must be left with one

T = TypeVar("T", float, Tensor)


class Reconstruction(Repair):
    """What both have in common."""

    probes = "scattered"
    all_in = True

    def costs(self, work: Work, keys: T) -> dict[str, T]:
        """Of the tail beside its probes, per head, in pair equivalents: D + Dv products each. `keys` are
        those that are not padding, as one number or [B, 1]."""
        raise NotImplementedError

    def slot_mass(self, work: Work, log_mass: Tensor) -> Tensor:
        """What a K/V group weighs at an anchor in the tail.  # [B, H, Cq, Ck]"""
        return log_mass

    def tail(self, work: Work, slots: Slots, log_mass: Tensor) -> ExtraKeys:
        raise NotImplementedError

    def working_dtype(self, work: Work) -> torch.dtype:
        return working_dtype(work.call.q.dtype)

    def least_density(self, work: Work) -> float | Tensor:
        keys = _keys(work)
        costs = [*self.costs(work, keys).values(), _routing_cost(work, keys), work.sizes.probes * keys]
        return 1.5 * torch.stack(costs).sum(0) / (work.call.q.shape[2] * keys).clamp(min=1)

    def finish(self, work: Work, plan: Plan, out: Tensor) -> tuple[Tensor, Tensor | None]:
        out = narrow(out, work.call.q.dtype)
        if plan.probes is None:
            return out, plan.error
        return plan.probes.put(_poisoned(out, plan.probes)), plan.error

    def plan(self, work: Work) -> Plan:
        call, grouping, sizes, backend = work.call, work.grouping, work.sizes, work.backend
        if work.config.density == 1.0 and work.config.max_error is None:
            return Plan(keep_all(call, grouping))
        costs = self.costs(work, _keys(work))
        with work.clock.stage("routing"):
            log_mass = cell_scores(call, grouping, work.config.score, backend)
            route, lean = self._route(work, log_mass, torch.stack([*costs.values()]).sum(0))
        with work.clock.stage("tail"):
            mass = self.slot_mass(work, log_mass)
            slots = assign_slots(
                route, grouping, mass, sizes.single_slots, sizes.merged_slots, ~lean, backend
            )
            tail = self.tail(work, slots, mass)
        spent = {name: torch.where(lean, 0.0, cost) for name, cost in costs.items()}
        spent["routing"] = _routing_cost(work, _keys(work)).expand_as(work.density)
        if not sizes.probes:
            return Plan(route, None, tail, costs=spent)
        with work.clock.stage("probes"):
            probes, verdict = judge(work, route, tail, lean)
        spent["judging"] = verdict.pairs
        return Plan(
            self._dense_where(verdict.dense, route, work), probes, _switched(tail, verdict), verdict.error,
            verdict.choices, verdict.choice, spent,
        )  # fmt: skip

    def _route(self, work: Work, log_mass: Tensor, cost: Tensor) -> tuple[Route, Tensor]:
        """Cells within the budget that the tail leaves, or within all of it where a head is better off
        without a tail: where its mass is so concentrated that the tail's cost buys nearly all that is left
        of it."""
        call, grouping, probes = work.call, work.grouping, work.sizes.probes
        judging = 1.5 * probes * work.density * _keys(work)
        without = (
            pair_budget(call, work.density, probes)
            - (_routing_cost(work, _keys(work)) + judging).ceil().long()
        )
        budget = without - cost.ceil().long()
        routes = [keep_best(call, grouping, log_mass, pairs, work.backend) for pairs in (budget, without)]
        missed = [_missed(found, grouping, log_mass) for found in routes]
        lean = (missed[1] < LEAN * missed[0]) | (budget < LEAST_PAIRS * without)  # [B, H]
        cells = torch.where(lean[..., None, None], routes[1].cells, routes[0].cells)
        return replace(routes[0], cells=cells), lean

    def _dense_where(self, dense: Tensor, route: Route, work: Work) -> Route:
        if work.config.max_error is None:
            return route
        every = keep_all(work.call, work.grouping).cells
        return replace(route, cells=route.cells | (every & dense[..., None, None]))


@register
class Anchored(Reconstruction):
    name: ClassVar[str] = "anchored"
    summary: ClassVar[str] = "skipped groups enter through an expansion around the anchors of the router"

    def plan(self, work: Work) -> Plan:
        keys = float(work.call.k.shape[2])
        left = work.config.density * work.call.q.shape[2] * keys
        left -= work.sizes.probes * keys + _routing_cost(work, keys)
        cost = sum(self.costs(work, keys).values())
        if work.config.density < 1.0 and cost > (1 - LEAST_PAIRS) * left:
            note = (
                f"anchors would take {cost / max(left, cost):.0%} of the budget: centroids stand in for them"
            )
            return replace(REPAIRS["tail"].plan(work), notes=(note,))
        return super().plan(work)

    def costs(self, work: Work, keys: T) -> dict[str, T]:
        call, sizes = work.call, work.sizes
        rows, anchors, rank = call.free_queries.count, sizes.query_groups, sizes.drift_rank
        dim, value_dim = call.q.shape[3], call.v.shape[3]
        mixing = anchors * sizes.kv_groups * rank * value_dim / (dim + value_dim)
        return {
            "anchors": anchors * keys * (2 * dim + value_dim) / (dim + value_dim),
            "tail": 0 * keys + rows * (sizes.single_slots + sizes.merged_slots),
            "covariances": rows * rank + keys * rank / call.shares + mixing,
        }

    def tail(self, work: Work, slots: Slots, log_mass: Tensor) -> ExtraKeys:
        return expand(work.call, work.grouping, slots, work.sizes.drift_rank, work.backend)


@register
class Tail(Reconstruction):
    name: ClassVar[str] = "tail"
    summary: ClassVar[str] = "skipped groups enter through their sizes, key centroids and value centroids"

    def costs(self, work: Work, keys: T) -> dict[str, T]:
        sizes, rows = work.sizes, work.call.free_queries.count
        slots = sizes.single_slots + sizes.merged_slots
        return {"tail": 0 * keys + rows * slots + sizes.query_groups * sizes.kv_groups}

    def slot_mass(self, work: Work, log_mass: Tensor) -> Tensor:
        return centroid_mass(work.call, work.grouping, work.backend)

    def tail(self, work: Work, slots: Slots, log_mass: Tensor) -> ExtraKeys:
        return merge(work.call, work.grouping, slots, log_mass, work.backend)


def _keys(work: Work) -> Tensor:
    """Keys that are not padding.  # [B, 1] fp64"""
    return valid_keys(work.call)[:, None].double()


def _routing_cost(work: Work, keys: T) -> T:
    """Products of anchors with keys, or with key centroids, in pair equivalents."""
    call = work.call
    columns = keys if work.config.score == "mass" else 0 * keys + work.sizes.kv_groups
    return work.sizes.query_groups * columns * call.q.shape[3] / (call.q.shape[3] + call.v.shape[3])


def _missed(route: Route, grouping: Grouping, log_mass: Tensor) -> Tensor:
    """Mean share of a row's mass that is skipped, at the anchors.  # [B, H]"""
    share = torch.nan_to_num(log_mass, nan=-torch.inf).softmax(-1)
    missed = torch.where(route.cells, 0.0, share).sum(-1)  # [B, H, Cq]
    sizes = grouping.query.sizes
    return (missed * sizes).sum(-1) / sizes.sum(-1).clamp(min=1)


def _poisoned(out: Tensor, probes: Probes) -> Tensor:
    """NaN in every row of a channel in which a probe has met NaN or Inf that its row here has not:
    something among the skipped values is not finite, and dense attention would pass it on."""
    missed, here = probes.residual(out)
    lost = (~torch.isfinite(missed) & torch.isfinite(here)).any(2, keepdim=True)  # [B, H, 1, Dv]
    if out.device.type == "cpu" and not lost.any():  # a GPU must not wait for the answer
        return out
    return torch.where(lost, torch.nan, out)


def _switched(tail: ExtraKeys, verdict: Verdict) -> ExtraKeys:
    """Without the tail, or its drift, in the heads that do better without."""
    weight = torch.where(verdict.with_tail[..., None, None], tail.log_weight, -torch.inf)
    if tail.drift is None:
        return replace(tail, log_weight=weight)
    moves = verdict.with_drift[..., None, None]
    curve = torch.where(moves, tail.drift.curve, 0.0)
    slope = torch.where(moves[..., None], tail.drift.slope, 0.0)
    return replace(tail, log_weight=weight, drift=replace(tail.drift, curve=curve, slope=slope))

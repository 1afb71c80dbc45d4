"""What `anchored` and `tail` have in common: rows attend to a summary of the skipped groups.

Both choose before the kernel runs. A few rows that no fit has seen are computed exactly, once against every
key and once as the call would compute them. Their errors decide what each head does, and are its error
estimate.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...ops.backend import Backend
from ...types import Choice, Grouping, HeadCost, Probes, Route, SummaryKeys
from ..route import cell_scores, cells_within, group_worth, keep_all, keep_best, pair_budget
from ..stages import GroupedCall, Routing, SizedCall, Verdict
from ..text import held_share
from .base import Reconstruction
from .centres import Centres
from .dtypes import narrow, wide_enough
from .expansion import Scatter
from .judge import judge
from .slots import Slots, assign_slots

# A head drops the summary if spending its cost on pairs leaves at most this share of the skipped mass.
BARE_BELOW = 0.2
# The share is smaller where an expansion is accurate: at most this multiple of the variance of the scores
# that the expansion leaves out, with which its error grows (docs/decisions/0016-concentrated-heads.md).
BARE_SLOPE = 0.5
# A head drops the summary if that variance is above this: the expansion is then useless, and there are too
# few probe rows to notice every row that it spoils.
BARE_ABOVE = 20.0
# A head drops the summary if it would leave less than this share of the budget for pairs.
MIN_PAIRS = 0.1
# The most that judging a probe row costs, in units of the pairs that the row keeps.
JUDGING = 1.5
# A moving budget never falls below this multiple of the work beside the pairs.
MIN_BUDGET = 1.15


class Summarised(Reconstruction):
    """A reconstruction through `SummaryKeys`; subclasses say how the summary is made and what it costs."""

    probe_policy = "scattered"
    all_in = True

    def summary_costs(self, sized: SizedCall) -> dict[str, HeadCost]:
        """What making the summary and attending to it costs, by kind of work."""
        raise NotImplementedError

    def summary_cost(self, sized: SizedCall) -> HeadCost:
        """The sum of `summary_costs`."""
        costs = self.summary_costs(sized).values()
        return HeadCost(sum(cost.fixed for cost in costs), sum(cost.per_key for cost in costs))

    def scatter(self, grouped: GroupedCall) -> Scatter | None:
        """How far tokens are from the middle of their groups, if that tells how good the summary will be."""
        return None

    def score(self, grouped: GroupedCall) -> tuple[Tensor, Centres | None]:
        """The log of what every K/V group weighs at every anchor, [B, H, Cq, Ck], and the centres from which
        that was computed, if any."""
        return cell_scores(grouped.call, grouped.grouping, grouped.config.score, grouped.backend), None

    def summary_keys(self, grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
        """One key and value for every slot."""
        raise NotImplementedError

    def route(self, grouped: GroupedCall) -> Routing:
        """Cells within the budget that the summary leaves, or within all of it in heads that are better off
        without one: whose mass is so concentrated that the summary's cost buys nearly all that is left."""
        call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
        if grouped.config.skips_nothing:
            return Routing(keep_all(call, grouping))
        log_mass, centres = self.score(grouped)
        overhead = grouped.price(self.routing_cost(grouped)) + self._judging_cost(grouped)
        bare_budget = pair_budget(call, grouped.allowed, grouped.sizes.probes) - overhead.ceil().long()
        summary = grouped.price(self.summary_cost(grouped))
        budget = bare_budget - (math.ceil(summary) if isinstance(summary, float) else summary.ceil().long())
        scope = grouped.config.budget_scope
        worth = group_worth(grouped)
        # What is dropped is gone with all its mass, whatever a summary would have made of it. A CPU ranks the
        # cells by mass only if a head turns out to drop them; a GPU, which must not be asked, at once
        may_wait = grouped.rules.host_may_wait
        weighed = None if may_wait else 1
        both = cells_within(call, grouping, log_mass, (budget, bare_budget), scope, backend, worth, weighed)
        missed = _mean_over_rows(backend.missed_mass(log_mass, both), grouping)
        scatter = self.scatter(grouped)
        # in whole numbers: their product with a float would have torch's default dtype
        bare = budget * round(1 / MIN_PAIRS) < bare_budget  # [B, H]
        bare_below: Tensor | float = BARE_BELOW
        if scatter is not None:
            left_out = scatter.of_scores(call.scale)  # [B, H]
            bare_below = (BARE_SLOPE * left_out).clamp(max=BARE_BELOW)
            bare = bare | (left_out > BARE_ABOVE)
        bare = bare | (missed[1] <= bare_below * missed[0])
        dropping = both[1]
        if may_wait and bool(bare.any()):
            dropping = keep_best(call, grouping, log_mass, bare_budget, scope, backend).cells
        cells = torch.where(bare[..., None, None], dropping, both[0])
        route = Route(grouping.query, grouping.kv, cells, grouping.pinned_groups)
        return Routing(route, log_mass, bare, centres, scatter)

    def summarise(self, grouped: GroupedCall, routing: Routing) -> SummaryKeys | None:
        if routing.log_mass is None or routing.bare is None:
            return None
        return self.summary_keys(grouped, routing, assign_slots(grouped, routing))

    def judge(self, grouped: GroupedCall, routing: Routing, summary: SummaryKeys | None) -> Verdict:
        if summary is None or routing.bare is None or not grouped.sizes.probes:
            return Verdict(routing.route, summary)
        verdict = judge(grouped, routing.route, summary, routing.bare, self.policy(grouped.config))
        assert verdict.choice is not None
        route = _dense_where(verdict.choice, routing.route, grouped)
        return replace(verdict, route=route, summary=grouped.backend.switch_summary(summary, verdict.choice))

    def finish(self, grouped: GroupedCall, verdict: Verdict, out: Tensor) -> tuple[Tensor, Tensor | None]:
        out = narrow(out, grouped.call.q.dtype)
        if verdict.probes is None:
            return out, verdict.error
        # where the broken channels are known, `extremes.give_back` does this
        if grouped.call.broken_channels is None and grouped.rules.host_may_wait:
            out = _poisoned(out, verdict.probes, grouped.backend)
        return verdict.probes.put(out), verdict.error

    def costs(self, grouped: GroupedCall, routing: Routing) -> dict[str, Tensor]:
        costs = super().costs(grouped, routing)
        if routing.bare is None:
            return costs
        summary = {name: cost.at(grouped.keys) for name, cost in self.summary_costs(grouped).items()}
        return costs | {name: torch.where(routing.bare, 0.0, cost) for name, cost in summary.items()}

    def min_density(self, grouped: GroupedCall) -> Tensor | float:
        keys = grouped.key_count
        cost = grouped.price(self.summary_cost(grouped)) + grouped.price(self.routing_cost(grouped))
        cost = MIN_BUDGET * (cost + grouped.sizes.probes * keys)
        pairs = grouped.call.q.shape[2] * keys * (1 - held_share(grouped.call))
        return cost / (pairs.clamp(min=1) if isinstance(pairs, Tensor) else max(1.0, pairs))

    def output_dtype(self, grouped: GroupedCall) -> torch.dtype:
        return wide_enough(grouped.call.q.dtype)

    def _judging_cost(self, grouped: GroupedCall) -> Tensor:
        """The most that judging costs: the probe rows once more over the cells that they keep.  # [B, H]"""
        return JUDGING * grouped.sizes.probes * grouped.allowed * grouped.key_count


def _dense_where(choice: Tensor, route: Route, grouped: GroupedCall) -> Route:
    """The route with every cell of the heads kept that chose to be dense."""
    if grouped.config.max_error is None:  # then no head may choose it
        return route
    every = keep_all(grouped.call, grouped.grouping).cells
    dense = (choice == Choice.DENSE)[..., None, None]
    return replace(route, cells=route.cells | (every & dense))


def _mean_over_rows(x: Tensor, grouping: Grouping) -> Tensor:
    """The mean over rows of what their query groups have in common.  # [..., B, H, Cq] -> [..., B, H]"""
    sizes = grouping.query.sizes
    return (x * sizes).sum(-1) / sizes.sum(-1).clamp(min=1)


def _poisoned(out: Tensor, probes: Probes, backend: Backend) -> Tensor:
    """NaN in every row of a channel in which a probe has met NaN or Inf that its row here has not:
    something among the skipped values is not finite, and dense attention would pass it on."""
    missed, here = probes.residual(out)
    lost = (~torch.isfinite(missed) & torch.isfinite(here)).any(2, keepdim=True)  # [B, H, 1, Dv]
    return backend.spoil(out, lost)

"""Anchored reconstruction: skipped groups enter through an expansion around the anchors of the router."""

from __future__ import annotations

from ...receipt import Note
from ...types import HeadCost, SummaryKeys
from ..sizes import skippable_density
from ..stages import GroupedCall, Routing, SizedCall
from .base import RECONSTRUCTIONS, Reconstruction
from .expansion import Scatter, drift_cost, expand
from .slots import Slots
from .summarised import JUDGING, MIN_PAIRS, Summarised


@RECONSTRUCTIONS.register
class Anchored(Summarised):
    """See docs/method.md, "Anchored reconstruction"."""

    name = "anchored"
    about = "skipped groups enter through an expansion around the anchors of the router"

    def affordable(self, sized: SizedCall) -> tuple[Reconstruction, tuple[Note, ...]]:
        config, call = sized.config, sized.call
        if config.density == 1.0:
            return self, ()
        # Decided from the shapes, padding included: a GPU must not wait for a count of the mask.
        keys = float(call.k.shape[2])
        cost = self.summary_cost(sized).at(keys)
        density = skippable_density(config, call)
        left = density * call.free_queries.count * call.free_keys.count
        left -= sized.sizes.probes * keys + self.routing_cost(sized).at(keys)
        left -= JUDGING * sized.sizes.probes * (density * call.free_keys.count + call.pinned_keys.count)
        if cost <= (1 - MIN_PAIRS) * left:
            return self, ()
        sentence = "anchors would take {} of the budget: centres of the groups stand in for them"
        return RECONSTRUCTIONS["tail"], (Note(sentence, f"{cost / max(left, cost):.0%}"),)

    def summary_costs(self, sized: SizedCall) -> dict[str, HeadCost]:
        call, sizes = sized.call, sized.sizes
        rows, anchors = call.free_queries.count, sizes.query_groups
        dim, value_dim = call.q.shape[3], call.v.shape[3]
        return {
            "anchors": HeadCost(per_key=anchors * (2 * dim + value_dim) / (dim + value_dim)),
            "summary": HeadCost(rows * (sizes.single_slots + sizes.merged_slots)),
            "covariances": drift_cost(sized),
        }

    def scatter(self, grouped: GroupedCall) -> Scatter:
        return Scatter.of(grouped)

    def summary_keys(self, grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
        return expand(grouped, routing, slots)

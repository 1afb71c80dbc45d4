"""Anchored reconstruction: skipped groups enter through an expansion around the anchors of the router."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import SummaryKeys
from .base import RECONSTRUCTIONS, GroupedCall, Reconstruction
from .expansion import expand
from .slots import Slots
from .summarised import MIN_PAIRS, Summarised


@RECONSTRUCTIONS.register
class Anchored(Summarised):
    """See docs/method.md, "Anchored reconstruction"."""

    name = "anchored"
    about = "skipped groups enter through an expansion around the anchors of the router"

    def affordable(self, grouped: GroupedCall) -> tuple[Reconstruction, tuple[str, ...]]:
        config, call = grouped.config, grouped.call
        if config.density == 1.0:
            return self, ()
        # Decided from the shapes, padding included: a GPU must not wait for a count of the mask.
        keys = torch.tensor(float(call.k.shape[2]), dtype=torch.float64)
        cost = float(torch.stack([*self.summary_costs(grouped, keys).values()]).sum())
        left = config.density * call.q.shape[2] * float(keys)
        left -= grouped.sizes.probes * float(keys) + float(self.routing_cost(grouped, keys))
        if cost <= (1 - MIN_PAIRS) * left:
            return self, ()
        share = f"{cost / max(left, cost):.0%}"
        return RECONSTRUCTIONS["tail"], (
            f"anchors would take {share} of the budget: centroids stand in for them",
        )

    def summary_costs(self, grouped: GroupedCall, keys: Tensor) -> dict[str, Tensor]:
        call, sizes = grouped.call, grouped.sizes
        rows, anchors, rank = call.free_queries.count, sizes.query_groups, sizes.drift_rank
        dim, value_dim = call.q.shape[3], call.v.shape[3]
        mixing = anchors * sizes.kv_groups * rank * value_dim / (dim + value_dim)
        return {
            "anchors": anchors * keys * (2 * dim + value_dim) / (dim + value_dim),
            "summary": torch.full_like(keys, rows * (sizes.single_slots + sizes.merged_slots)),
            "covariances": rows * rank + keys * rank / call.shares + mixing,
        }

    def summary_keys(self, grouped: GroupedCall, slots: Slots, slot_mass: Tensor) -> SummaryKeys:
        return expand(grouped.call, grouped.grouping, slots, grouped.sizes.drift_rank, grouped.backend)

"""What stands for the query-key pairs that a call skips: the reconstructions.

A reconstruction is a class with a few verbs, called in turn by `residua.api`: `route` chooses the cells to
compute exactly, `summarise` describes what is skipped, `judge` computes some rows exactly, `finish` corrects
the kernel's output. A new one is a class with `@RECONSTRUCTIONS.register`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..config import RECONSTRUCTION_TRAITS, Config, Traits
from ..ops.backend import Backend
from ..receipt import Note
from ..registry import Registry
from ..types import Choice, Grouping, HeadCost, Probes, ResidualFit, Route, SummaryKeys
from .judge import judge, take_probes
from .route import best_cells, cell_scores, group_priority, keep_all, pair_budget, route_cells, route_over, routing_cost
from .sizes import skippable_density, text_share
from .stages import Centres, GroupedCall, Routing, Scatter, SizedCall, Slots, Verdict
from .summary.centres import centre_mass, centres_cost, find_centres, merge_centres
from .summary.expansion import assign_slots, drift, drift_cost, expand, measure_scatter

# A head drops the summary if spending its cost on pairs leaves at most this share of the skipped mass.
MAX_MISSED = 0.2
# The share is smaller where an expansion is accurate: at most this multiple of the variance of the scores
# that the expansion leaves out, with which its error grows (docs/decisions/0016-concentrated-heads.md).
MISSED_PER_VARIANCE = 0.5
# A head drops the summary if that variance is above this: the expansion is then useless, and there are too
# few probe rows to notice every row that it spoils.
MAX_VARIANCE = 20.0
MIN_PAIRS = 0.1  # a head drops the summary if it would leave less than this share of the budget for pairs
JUDGING = 1.5  # the most that judging a probe row costs, in units of the pairs that the row keeps
MIN_BUDGET = 1.15  # a moving budget never falls below this multiple of the work beside the pairs


class Reconstruction:
    """The base reconstructs nothing: what is skipped is dropped."""

    name: ClassVar[str] = "none"
    about: ClassVar[str] = "drop what is skipped"
    probe_policy: ClassVar[str | None] = None  # how its probe rows are placed; None: it takes none
    all_in: ClassVar[bool] = False  # whether `density` pays for everything, not for exact pairs alone

    def affordable(self, sized: SizedCall) -> tuple[Reconstruction, tuple[Note, ...]]:
        """What the budget of this call can pay for: this one, or a cheaper one and notes for the receipt."""
        return self, ()

    def routing_cost(self, sized: SizedCall) -> HeadCost:
        """What scoring the cells costs."""
        return routing_cost(sized)

    def route(self, grouped: GroupedCall) -> Routing:
        """Spends the pair budget of every head on its best cells."""
        return route_cells(grouped)

    def summarise(self, grouped: GroupedCall, routing: Routing) -> SummaryKeys | None:
        """Keys and values that stand for the skipped groups in the softmax, or None."""
        return None

    def judge(self, grouped: GroupedCall, routing: Routing, summary: SummaryKeys | None) -> Verdict:
        """Computes the probe rows exactly, and lets heads choose by them what the kernel will do."""
        return Verdict(routing.route, summary)

    def finish(self, grouped: GroupedCall, verdict: Verdict, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Corrects the kernel's output -> output [B, H, Nq, Dv] in the call's dtype, estimated error [B, H] if any."""
        return out, verdict.error

    def costs(self, grouped: GroupedCall, routing: Routing) -> dict[str, Tensor]:
        """Work beside the exact pairs, in pair equivalents of D + Dv products.  # [B, H] each"""
        if routing.log_mass is None:
            return {}
        return {"routing": self.routing_cost(grouped).at(grouped.keys).expand_as(grouped.allowed)}

    def min_density(self, sized: SizedCall) -> Tensor | float:
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


@RECONSTRUCTIONS.register
class ProbeFit(Reconstruction):
    """The paper's: a weighted affine map from the sparse output to what it misses, fitted on exact probe rows (its
    section 4.2, appendix A). The fit itself is `Backend.fit_residual`."""

    name = "probe"
    about = "the paper's: an affine map of the sparse output, fitted on exact probe rows"
    probe_policy = "stratified"

    def judge(self, grouped: GroupedCall, routing: Routing, summary: SummaryKeys | None) -> Verdict:
        if not grouped.sizes.probes:
            return Verdict(routing.route)
        return Verdict(routing.route, probes=take_probes(grouped, self.policy(grouped.config)))

    def output_dtype(self, grouped: GroupedCall) -> torch.dtype:
        return torch.float32 if grouped.sizes.probes else grouped.call.q.dtype

    def finish(self, grouped: GroupedCall, verdict: Verdict, out: Tensor) -> tuple[Tensor, Tensor | None]:
        probes, config, sizes = verdict.probes, grouped.config, grouped.sizes
        if probes is None:
            return out, None
        missed, x = probes.residual(out)
        fit = grouped.backend.fit_residual(
            x, missed, probes.weights, sizes.residual_rank, config.ridge, config.subspace
        )
        out = apply_fit(out, fit, probes, grouped.call.q.dtype, grouped.backend)
        # one probe alone is met exactly and says nothing about the others
        return out, estimate_error(fit, probes) if sizes.probes > 1 else None


class Summarised(Reconstruction):
    """What `anchored` and `tail` have in common: rows attend to a summary of the skipped groups.

    Both choose before the kernel runs. A few rows that no fit has seen are computed exactly, once against every
    key and once as the call would compute them. Their errors decide what each head does, and are its error
    estimate. Subclasses say how the summary is made and what it costs."""

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
        return cell_scores(grouped), None

    def summary_keys(self, grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
        """One key and value for every slot."""
        raise NotImplementedError

    def route(self, grouped: GroupedCall) -> Routing:
        """Cells within the budget that the summary leaves, or within all of it in heads that are better off
        without one."""
        if grouped.config.skips_nothing:
            return Routing(keep_all(grouped))
        log_mass, centres = self.score(grouped)
        judging = JUDGING * grouped.sizes.probes * grouped.allowed * grouped.key_count  # [B, H]
        overhead = grouped.price(self.routing_cost(grouped)) + judging
        all_pairs = pair_budget(grouped.call, grouped.allowed, grouped.sizes.probes) - overhead.ceil().long()
        summary = grouped.price(self.summary_cost(grouped))
        pairs = all_pairs - (math.ceil(summary) if isinstance(summary, float) else summary.ceil().long())
        # Heads without a summary are ranked by mass alone: what they skip is lost. If the host may wait, it first
        # looks whether there is such a head; otherwise both rankings are made at once.
        may_wait = grouped.rules.host_may_wait
        found = best_cells(grouped, log_mass, (pairs, all_pairs), group_priority(grouped), None if may_wait else 1)
        missed, missed_without = _mean_over_rows(grouped.backend.missed_mass(log_mass, found), grouped.grouping)
        cells, cells_without = found
        scatter = self.scatter(grouped)
        # in whole numbers: their product with a float would have torch's default dtype
        without_summary = pairs * round(1 / MIN_PAIRS) < all_pairs  # [B, H]
        enough: Tensor | float = MAX_MISSED
        if scatter is not None:
            variance = scatter.of_scores(grouped.call.scale)  # [B, H]
            enough = (MISSED_PER_VARIANCE * variance).clamp(max=MAX_MISSED)
            without_summary = without_summary | (variance > MAX_VARIANCE)
        without_summary = without_summary | (missed_without <= enough * missed)
        if may_wait and bool(without_summary.any()):
            (cells_without,) = best_cells(grouped, log_mass, [all_pairs])
        cells = torch.where(without_summary[..., None, None], cells_without, cells)
        return Routing(route_over(grouped, cells), log_mass, without_summary, centres, scatter)

    def summarise(self, grouped: GroupedCall, routing: Routing) -> SummaryKeys | None:
        if routing.log_mass is None or routing.without_summary is None:
            return None
        return self.summary_keys(grouped, routing, assign_slots(grouped, routing))

    def judge(self, grouped: GroupedCall, routing: Routing, summary: SummaryKeys | None) -> Verdict:
        if summary is None or routing.without_summary is None or not grouped.sizes.probes:
            return Verdict(routing.route, summary)
        verdict = judge(grouped, routing, summary, self.policy(grouped.config))
        assert verdict.choice is not None
        route = _dense_where(verdict.choice, routing.route, grouped)
        return replace(verdict, route=route, summary=grouped.backend.switch_summary(summary, verdict.choice))

    def finish(self, grouped: GroupedCall, verdict: Verdict, out: Tensor) -> tuple[Tensor, Tensor | None]:
        out = narrow(out, grouped.call.q.dtype)
        if verdict.probes is None:
            return out, verdict.error
        # where the broken channels are known, `extremes.restore` does this
        if grouped.call.broken_channels is None and grouped.rules.host_may_wait:
            out = _with_lost_channels(out, verdict.probes, grouped)
        return verdict.probes.put(out), verdict.error

    def costs(self, grouped: GroupedCall, routing: Routing) -> dict[str, Tensor]:
        costs = super().costs(grouped, routing)
        if routing.without_summary is None:
            return costs
        summary = {name: cost.at(grouped.keys) for name, cost in self.summary_costs(grouped).items()}
        return costs | {name: torch.where(routing.without_summary, 0.0, cost) for name, cost in summary.items()}

    def min_density(self, sized: SizedCall) -> Tensor | float:
        keys = sized.key_count
        cost = sized.price(self.summary_cost(sized)) + sized.price(self.routing_cost(sized))
        cost = MIN_BUDGET * (cost + sized.sizes.probes * keys)
        pairs = sized.call.q.shape[2] * keys * (1 - text_share(sized.call))
        return cost / (pairs.clamp(min=1) if isinstance(pairs, Tensor) else max(1.0, pairs))

    def output_dtype(self, grouped: GroupedCall) -> torch.dtype:
        return wide_enough(grouped.call.q.dtype)


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
        return measure_scatter(grouped)

    def summary_keys(self, grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
        return expand(grouped, routing, slots)


@RECONSTRUCTIONS.register
class Tail(Summarised):
    """A simple relative of anchored reconstruction: a skipped K/V group enters through one key and value in its
    middle. Nothing is computed at the anchors: there can be many of them, and many small groups."""

    name = "tail"
    about = "skipped groups enter through one key and value in their middle"

    def routing_cost(self, sized: SizedCall) -> HeadCost:
        return centres_cost(sized)

    def score(self, grouped: GroupedCall) -> tuple[Tensor, Centres]:
        centres = find_centres(grouped)
        return centre_mass(grouped, centres), centres

    def summary_costs(self, sized: SizedCall) -> dict[str, HeadCost]:
        sizes, rows = sized.sizes, sized.call.free_queries.count
        slots = sizes.single_slots + sizes.merged_slots
        costs = {"summary": HeadCost(rows * slots + sizes.query_groups * sizes.kv_groups)}
        return costs | ({"covariances": drift_cost(sized)} if self._drifts(sized) else {})

    def scatter(self, grouped: GroupedCall) -> Scatter | None:
        return measure_scatter(grouped) if self._drifts(grouped) else None

    def summary_keys(self, grouped: GroupedCall, routing: Routing, slots: Slots) -> SummaryKeys:
        moving = drift(grouped, slots, routing.scatter) if self._drifts(grouped) else None
        return merge_centres(grouped, routing, slots, moving)

    def _drifts(self, sized: SizedCall) -> bool:
        return sized.sizes.drift_rank > 0 and sized.rules.drifts_centres


def apply_fit(out: Tensor, fit: ResidualFit, probes: Probes, dtype: torch.dtype, backend: Backend) -> Tensor:
    """Corrects the sparse output [B, H, Nq, Dv] fp32 in one pass and puts the exact probe rows in place."""
    out = backend.add_affine(out, fit.left, fit.right, fit.bias, wide_enough(dtype))
    return probes.put(narrow(out, dtype))


def estimate_error(fit: ResidualFit, probes: Probes) -> Tensor:
    """Estimated mean relative row error: every probe compared with the fit without it, weighted by coverage.

    Stratified probes lie near the middle of their groups, so the estimate reads low for them.  # [B, H]
    """
    return weighted_error(fit.left_out, probes)


def weighted_error(missed: Tensor, probes: Probes) -> Tensor:
    """Mean relative error of the probe rows, weighted by the number of rows that each stands for.

    missed [..., B, H, M, Dv], exact output minus approximate output of these rows -> [..., B, H] fp32
    """
    tiny = torch.finfo(torch.float32).tiny
    error = missed.norm(dim=-1) / probes.exact.norm(dim=-1).clamp(min=tiny)  # [B, H, M]
    return (error * probes.weights).sum(-1) / probes.weights.sum(-1).clamp(min=tiny)


def _dense_where(choice: Tensor, route: Route, grouped: GroupedCall) -> Route:
    """The route with every cell of the heads kept that chose to be dense."""
    if grouped.config.max_error is None:  # then no head may choose it
        return route
    dense = (choice == Choice.DENSE)[..., None, None]
    return replace(route, cells=route.cells | (keep_all(grouped).cells & dense))


def _mean_over_rows(x: Tensor, grouping: Grouping) -> Tensor:
    """The mean over rows of what their query groups have in common.  # [..., B, H, Cq] -> [..., B, H]"""
    sizes = grouping.query.sizes
    return (x * sizes).sum(-1) / sizes.sum(-1).clamp(min=1)


def _with_lost_channels(out: Tensor, probes: Probes, grouped: GroupedCall) -> Tensor:
    """NaN in every row of a channel in which a probe has met NaN or Inf that its row here has not:
    something among the skipped values is not finite, and dense attention would pass it on."""
    missed, here = probes.residual(out)
    lost = (~torch.isfinite(missed) & torch.isfinite(here)).any(2, keepdim=True)  # [B, H, 1, Dv]
    return grouped.backend.spoil(out, lost)


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an output is corrected: in fp16 a correction could overflow, where dense attention,
    a mean of the values, cannot."""
    return torch.float32 if dtype == torch.float16 else dtype


def narrow(out: Tensor, dtype: torch.dtype) -> Tensor:
    """A corrected output in its final dtype; finite values stay finite, Inf stays Inf."""
    if dtype != torch.float16:
        return out.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(out.isinf(), out, out.clamp(-limit, limit)).to(dtype)

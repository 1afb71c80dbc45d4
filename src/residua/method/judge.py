"""What each head does about the pairs that it skips, and how far off it is then: the candidates are compared
on rows that are known exactly."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..types import Choice, Probes, Route, SummaryKeys
from .probes import place_probes
from .stages import GroupedCall, Routing, Verdict
from .text import of_whole_call

# In the order of `Backend.candidate_errors`, which leaves the first one out where nothing drifts.
CANDIDATES = (Choice.WITH_DRIFT, Choice.WITHOUT_DRIFT, Choice.WITHOUT_SUMMARY)
HANDICAP = 0.9  # a simpler candidate must be better by this factor: noise must not decide
# A head whose estimate is above the bound by more than this runs dense at once; one that is less far off may
# only be badly estimated, and is given more in its next call.
CLEARLY_ABOVE = 1.5


def judge(grouped: GroupedCall, routing: Routing, summary: SummaryKeys, policy: str) -> Verdict:
    """Takes the probes and lets every head choose.

    Args:
        grouped: The call.
        routing: The cells that are kept, and the heads that have no summary to choose.
        summary: What stands for the other cells.
        policy: How the probe rows are placed.

    Returns:
        Probes, choice, estimated error and cost; route and summary as they were given.
    """
    call, backend, route = grouped.call, grouped.backend, routing.route
    assert routing.without_summary is not None
    index, weights = place_probes(grouped, policy)
    rows = backend.gather_rows(call.q, index)
    group = grouped.grouping.query.labels.gather(-1, index).clamp(min=0)  # [B, H, M]
    kept = route.cells.gather(2, group[..., None].expand(*group.shape, route.cells.shape[3]))
    exact, *sparse = backend.split_rows(rows, call.k, call.v, route.kv, kept, call.key_mask, call.scale)
    skipped = _summary_alone(grouped, rows, group, route.cells, summary)
    errors = backend.candidate_errors(rows, group, exact, (sparse[0], sparse[1]), skipped, summary.drift)
    choice, sparse_error = choose(grouped, errors, weights, routing.without_summary)
    error = sparse_error
    if grouped.config.max_error is not None:
        error = torch.where(choice == Choice.DENSE, 0.0, sparse_error)

    def costs() -> dict[str, Tensor]:
        sizes = route.kv.sizes.repeat_interleave(call.heads_per_kv, dim=1)[..., None, :]
        # the exact pass holds the scores already; only the values are summed a second time
        share = call.v.shape[3] / (call.q.shape[3] + call.v.shape[3])
        return {"judging": share * (kept * sizes).sum((-2, -1)).double()}

    return Verdict(route, summary, Probes(index, weights, exact), choice, error, sparse_error, costs)


def choose(grouped: GroupedCall, errors: Tensor, weights: Tensor, without_summary: Tensor) -> tuple[Tensor, Tensor]:
    """The best candidate of every head, and its error; a head that runs dense keeps the error that the best
    sparse candidate would have had.

    Args:
        grouped: The call.
        errors: [candidates, B, H, M] fp32, of every probe row with each candidate, the simplest last.
        weights: [B, H, M] fp32, how many rows each of them stands for.
        without_summary: [B, H] bool, heads that have no summary to choose.

    Returns:
        Choice [B, H] int64 and error [B, H] fp32.
    """
    best, error = grouped.backend.best_candidate(errors, weights, without_summary, HANDICAP)
    best = best + int(CANDIDATES[-len(errors)])  # from the place among the candidates to the `Choice`
    if grouped.config.max_error is not None:
        bound = grouped.config.max_error
        most = of_whole_call(grouped.call, torch.full_like(grouped.allowed, grouped.config.ceiling))
        dense = (error > bound) & (grouped.allowed >= most) | (error > CLEARLY_ABOVE * bound)
        best = torch.where(dense, int(Choice.DENSE), best)
    return best, error


def _summary_alone(
    grouped: GroupedCall, rows: Tensor, group: Tensor, cells: Tensor, summary: SummaryKeys
) -> tuple[Tensor, Tensor]:
    """The probe rows over the summary keys of their groups, without the drift.

    -> output [B, H, M, Dv], log-sum-exp [B, H, M], fp32
    """
    call, backend, kv = grouped.call, grouped.backend, grouped.grouping.kv
    query = backend.sort_groups(group, summary.keys.shape[2])
    # A route without K/V groups, not one whose cells are all False: a kernel then reads no cells.
    nobody = kv.labels.new_full((1, 1, 1), -1).expand_as(kv.labels)
    nothing = Route(query, replace(kv, labels=nobody, offsets=kv.offsets[..., :1]), cells[..., :0])
    still = replace(summary, drift=None)
    return backend.attend(rows, call.k, call.v, nothing, call.scale, still, torch.float32)

"""What each head does about the pairs that it skips, and how far off it is then: the candidates are compared
on rows that are known exactly."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..probes import place_probes
from ..row_error import weighted_error
from ..types import MAX_BEND, Probes, Route, SummaryKeys
from .base import Choice, GroupedCall, Verdict

HANDICAP = 0.9  # a simpler candidate must be better by this factor: noise must not decide


def judge(grouped: GroupedCall, route: Route, summary: SummaryKeys, bare: Tensor, policy: str) -> Verdict:
    """Takes the probes and lets every head choose.

    Args:
        grouped: The call.
        route: The cells that are kept.
        summary: What stands for the others.
        bare: [B, H] bool, heads that have no summary to choose.
        policy: How the probe rows are placed.

    Returns:
        Probes, choice, estimated error and cost; route and summary as they were given.
    """
    call, backend = grouped.call, grouped.backend
    index, weights = place_probes(
        call, grouped.grouping, grouped.sizes.probes, policy, grouped.config.probe_order, backend
    )
    rows = backend.gather_rows(call.q, index)
    group = grouped.grouping.query.labels.gather(-1, index).clamp(min=0)  # [B, H, M]
    flat = _flat(group, route.cells.shape[2])
    kept = _own(route.cells, flat)  # [B, H, M, Ck]
    exact, sparse, lse = backend.split_rows(rows, call.k, call.v, route.kv, kept, call.key_mask, call.scale)
    probes = Probes(index, weights, exact)
    candidates = _candidates(grouped, rows, group, flat, route.cells, summary, sparse, lse)
    choice, error = choose(grouped, probes, candidates, bare)

    def costs() -> dict[str, Tensor]:
        sizes = route.kv.sizes.repeat_interleave(call.shares, dim=1)[..., None, :]
        # the exact pass holds the scores already; only the values are summed a second time
        share = call.v.shape[3] / (call.q.shape[3] + call.v.shape[3])
        return {"judging": share * (kept * sizes).sum((-2, -1)).double()}

    return Verdict(route, summary, probes, choice, error, costs)


def choose(
    grouped: GroupedCall, probes: Probes, candidates: dict[Choice, Tensor], bare: Tensor
) -> tuple[Tensor, Tensor]:
    """The best candidate of every head, and its error.

    Args:
        grouped: The call.
        probes: Rows that are known exactly.
        candidates: What each choice would give there, [B, H, M, Dv] fp32, the simplest last.
        bare: [B, H] bool, heads that have no summary to choose.

    Returns:
        Choice [B, H] int64 and error [B, H] fp32.
    """
    missed = torch.stack(list(candidates.values())) - probes.exact  # [candidates, B, H, M, Dv]
    errors = dict(zip(candidates, weighted_error(missed, probes), strict=True))
    first, *simpler = errors
    best, error = torch.full_like(bare, int(first), dtype=torch.long), errors[first]
    for choice in simpler:
        better = errors[choice] < HANDICAP * error
        best, error = torch.where(better, int(choice), best), torch.where(better, errors[choice], error)
    best, error = torch.where(bare, int(Choice.PLAIN), best), torch.where(bare, errors[Choice.PLAIN], error)
    if grouped.config.max_error is not None:
        # even with all that the head may spend it is too far off
        dense = (error > grouped.config.max_error) & (grouped.allowed >= grouped.config.ceiling)
        best, error = torch.where(dense, int(Choice.DENSE), best), torch.where(dense, 0.0, error)
    return best, error


def _candidates(
    grouped: GroupedCall,
    rows: Tensor,
    group: Tensor,
    flat: Tensor,
    cells: Tensor,
    summary: SummaryKeys,
    sparse: Tensor,
    lse: Tensor,
) -> dict[Choice, Tensor]:
    """The probe rows as each choice would compute them.  # [B, H, M, Dv] fp32 each"""
    call, backend = grouped.call, grouped.backend
    query = backend.sort_groups(group, summary.keys.shape[2])
    kv = grouped.grouping.kv
    # no K/V group at all, rather than none of them: a kernel sees that without looking at the cells
    nobody = kv.labels.new_full((1, 1, 1), -1).expand_as(kv.labels)
    nothing = Route(query, replace(kv, labels=nobody, offsets=kv.offsets[..., :1]), cells[..., :0])
    still = replace(summary, drift=None)
    value, top = backend.attend(rows, call.k, call.v, nothing, call.scale, still, torch.float32)

    def joined(value: Tensor, top: Tensor) -> Tensor:
        # torch.sigmoid rounds differently from place to place
        share = (1 / (1 + (lse - top).exp()))[..., None]
        return torch.where(top[..., None] == -torch.inf, sparse, sparse + share * (value - sparse))

    simple = {Choice.WITHOUT_DRIFT: joined(value, top), Choice.PLAIN: sparse}
    drift = summary.drift
    if drift is None:
        return simple
    y = backend.matmul(rows, drift.basis.repeat_interleave(call.shares, dim=1)) - _own(drift.origin, flat)
    bend = (y * _own(drift.curve, flat) * y).sum(-1).clamp(max=MAX_BEND)
    shift = (y[..., None] * _own(drift.slope, flat)).sum(-2)
    return {Choice.WITH_DRIFT: joined(value + shift, top + bend)} | simple


def _flat(group: Tensor, groups: int) -> Tensor:
    """Query groups [B, H, M] numbered over all heads, for `_own`."""
    heads = torch.arange(group.shape[0] * group.shape[1], device=group.device).view(*group.shape[:2], 1)
    return group + heads * groups


def _own(x: Tensor, flat: Tensor) -> Tensor:
    """What belongs to the query groups of the probe rows.  # [B, H, Cq, ...], [B, H, M] -> [B, H, M, ...]"""
    return x.flatten(0, 2)[flat]

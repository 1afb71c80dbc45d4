"""What each head does, and how far off it is then: candidates compared on rows that are known exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..probes import place_probes
from ..types import DRIFT_MOST, ExtraKeys, Probes, Route
from .base import Work

HANDICAP = 0.9  # a simpler candidate must be better by this factor: noise must not decide
CHOICES = ("with drift", "without drift", "plain", "dense")


@dataclass(frozen=True)
class Verdict:
    choice: Tensor  # [B, H] int64, index into `choices`
    error: Tensor  # [B, H] fp32, mean relative error over the probe rows of what was chosen
    pairs: Tensor  # [B, H] fp64, what the judging itself evaluated
    choices: tuple[str, ...] = CHOICES

    @property
    def with_drift(self) -> Tensor:
        return self.choice == 0

    @property
    def with_tail(self) -> Tensor:
        return self.choice <= 1

    @property
    def dense(self) -> Tensor:
        return self.choice == 3


def judge(work: Work, route: Route, tail: ExtraKeys, lean: Tensor) -> tuple[Probes, Verdict]:
    """Takes the probes and lets every head choose. `lean` [B, H] heads have no tail to choose."""
    call, backend = work.call, work.backend
    policy = work.config.probe_policy or "scattered"
    index, weights = place_probes(call, work.grouping, work.sizes.probes, policy, backend)
    rows = backend.gather_rows(call.q, index)
    group = work.grouping.query.labels.gather(-1, index).clamp(min=0)  # [B, H, M]
    kept = _own(route.cells, group)  # [B, H, M, Ck]
    exact, sparse, lse = backend.split_rows(rows, call.k, call.v, route.kv, kept, call.key_mask, call.scale)
    probes = Probes(index, weights, exact)
    choice, error = _choose(
        work, probes, _candidates(work, rows, group, route.cells, tail, sparse, lse), lean
    )
    if tail.drift is None:
        choice = choice.clamp(min=1)  # the first two are the same, and the receipt must not claim a drift
    sizes = route.kv.sizes.repeat_interleave(call.shares, dim=1)[..., None, :]
    # the exact pass holds the scores already; only the values are summed a second time
    share = call.v.shape[3] / (call.q.shape[3] + call.v.shape[3])
    return probes, Verdict(choice, error, share * (kept * sizes).sum((-2, -1)).double())


def _choose(work: Work, probes: Probes, candidates: list[Tensor], lean: Tensor) -> tuple[Tensor, Tensor]:
    """The best candidate of every head, and its error.  # [B, H] each"""
    errors = [_error(out, probes) for out in candidates]
    best, error = torch.zeros_like(lean, dtype=torch.long), errors[0]
    for index, other in enumerate(errors[1:], start=1):
        better = other < HANDICAP * error
        best, error = torch.where(better, index, best), torch.where(better, other, error)
    best, error = torch.where(lean, 2, best), torch.where(lean, errors[2], error)
    if work.config.max_error is not None:
        # with all that it may spend it is still too far off
        dense = (error > work.config.max_error) & (work.density >= work.config.density)
        best, error = torch.where(dense, 3, best), torch.where(dense, 0.0, error)
    return best, error


def _candidates(
    work: Work, rows: Tensor, group: Tensor, cells: Tensor, tail: ExtraKeys, sparse: Tensor, lse: Tensor
) -> list[Tensor]:
    """The probe rows with tail and drift, with the tail alone, without it.  # [B, H, M, Dv] fp32 each"""
    call, backend = work.call, work.backend
    nothing = Route(backend.sort_groups(group, tail.keys.shape[2]), work.grouping.kv, torch.zeros_like(cells))
    value, top = backend.attend(
        rows, call.k, call.v, nothing, call.scale, replace(tail, drift=None), torch.float32
    )

    def joined(value: Tensor, top: Tensor) -> Tensor:
        share = (1 / (1 + (lse - top).exp()))[
            ..., None
        ]  # torch.sigmoid differs from place to place in the last bit
        return torch.where(top[..., None] == -torch.inf, sparse, sparse + share * (value - sparse))

    still = joined(value, top)
    if tail.drift is None:
        return [still, still, sparse]
    y = backend.matmul(rows, tail.drift.basis.repeat_interleave(work.call.shares, dim=1)) - _own(
        tail.drift.origin, group
    )
    bend = (y.square() * _own(tail.drift.curve, group)).sum(-1).clamp(max=DRIFT_MOST)
    shift = (y[..., None] * _own(tail.drift.slope, group)).sum(-2)
    return [joined(value + shift, top + bend), still, sparse]


def _own(x: Tensor, group: Tensor) -> Tensor:
    """What belongs to the query groups of the probe rows.  # [B, H, Cq, ...], [B, H, M] -> [B, H, M, ...]"""
    heads = torch.arange(group.shape[0] * group.shape[1], device=x.device).view(*group.shape[:2], 1)
    return x.flatten(0, 2)[group + heads * x.shape[2]]


def _error(out: Tensor, probes: Probes) -> Tensor:
    """Mean relative error of probe rows [B, H, M, Dv].  # [B, H]"""
    norm = probes.exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = (out - probes.exact).norm(dim=-1) / norm
    total = probes.weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (error * probes.weights).sum(-1) / total

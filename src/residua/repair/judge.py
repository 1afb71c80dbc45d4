"""What each head does, and how far off it is then: candidates compared on rows that are known exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


def judge(work: Work, route: Route, tail: ExtraKeys, probes: Probes, lean: Tensor) -> Verdict:
    """Lets every head choose. `lean` [B, H] heads have no tail to choose."""
    rows, labels = _probe_rows(work, probes)
    sparse, lse = _attend_kept(work, rows, labels, route)
    plain = _error(sparse, probes)
    still = _error(_with_tail(work, rows, labels, tail, sparse, lse, drift=False), probes)
    moving = still
    if tail.drift is not None:
        moving = _error(_with_tail(work, rows, labels, tail, sparse, lse, drift=True), probes)

    none = torch.zeros_like(plain, dtype=torch.long)
    best = none if tail.drift is not None else none + 1
    error = moving
    for index, other in ((1, still), (2, plain)):
        better = other < HANDICAP * error
        best, error = torch.where(better, index, best), torch.where(better, other, error)
    best, error = torch.where(lean, 2, best), torch.where(lean, plain, error)
    if work.config.max_error is not None:
        # with all that it may spend it is still too far off
        dense = (error > work.config.max_error) & (work.density >= work.config.density)
        best, error = torch.where(dense, 3, best), torch.where(dense, 0.0, error)
    return Verdict(best, error, _kept_keys(work, labels, route))


def _probe_rows(work: Work, probes: Probes) -> tuple[Tensor, Tensor]:
    """The probe rows [B, H, M, D] and their query groups [B, H, M]."""
    return work.backend.gather_rows(work.call.q, probes.rows), work.grouping.query.labels.gather(-1, probes.rows)


def _attend_kept(work: Work, rows: Tensor, labels: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """What the probe rows get from their kept cells: a call of its own with the same cells."""
    call, groups = work.call, route.query.groups
    few = Route(work.backend.sort_groups(labels, groups), route.kv, route.cells, route.pinned_groups)
    return work.backend.attend(rows, call.k, call.v, few, call.scale, out_dtype=torch.float32)


def _with_tail(
    work: Work, rows: Tensor, labels: Tensor, tail: ExtraKeys, sparse: Tensor, lse: Tensor, drift: bool
) -> Tensor:
    """The probe rows with their extra keys.  # [B, H, M, Dv] fp32"""
    group, rows = labels.clamp(min=0), rows.float()

    def own(x: Tensor) -> Tensor:
        """What belongs to the probe rows' groups.  # [B, H, Cq, ...] -> [B, H, M, ...]"""
        index = group.view(*group.shape, *[1] * (x.ndim - 3))
        return torch.take_along_dim(x, index, dim=2)

    logits = work.call.scale * (own(tail.keys) @ rows[..., None])[..., 0] + own(tail.log_weight)  # [B, H, M, T]
    value = torch.where(logits == -torch.inf, 0.0, logits.softmax(-1))[..., None, :] @ own(tail.values)
    value, top = value[..., 0, :], logits.logsumexp(-1)
    if drift and tail.drift is not None:
        basis = tail.drift.basis.repeat_interleave(work.call.shares, dim=1)
        y = rows @ basis - own(tail.drift.origin)
        top = top + (y.square() * own(tail.drift.curve)).sum(-1).clamp(max=DRIFT_MOST)
        value = value + (y[..., None, :] @ own(tail.drift.slope))[..., 0, :]
    share = torch.sigmoid(top - lse)[..., None]
    return torch.where(top[..., None] == -torch.inf, sparse, sparse + share * (value - sparse))


def _error(out: Tensor, probes: Probes) -> Tensor:
    """Mean relative error of probe rows [B, H, M, Dv].  # [B, H]"""
    norm = probes.exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = (out - probes.exact).norm(dim=-1) / norm
    total = probes.weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (error * probes.weights).sum(-1) / total


def _kept_keys(work: Work, labels: Tensor, route: Route) -> Tensor:
    """Pairs of the probe rows with their kept cells.  # [B, H] fp64"""
    sizes = route.kv.sizes.repeat_interleave(work.call.shares, dim=1)
    kept = (route.cells * sizes[..., None, :]).sum(-1)  # [B, H, Cq]
    return kept.gather(-1, labels.clamp(min=0)).sum(-1).double()

"""Probe rows: which query rows are evaluated exactly, how much each stands for, and their exact outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError
from .execution.backend import Backend
from .execution.torch_primitives import count_labels, group_sums
from .types import Call, Grouping, Probes


def select(
    coordinates: Tensor,
    labels: Tensor,
    groups: int,
    count: int,
    policy: str = "stratified",
    generator: torch.Generator | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses `count` distinct rows per head, at most all. Where fewer rows than that have a group, the rest
    is filled with rows of weight 0.

    "stratified" visits the groups in turn and takes from each the row nearest to the group's mean that is
    not taken yet (ties: the lower row index); "uniform" spaces rows evenly over the sequence; "random" draws
    them from `generator` (default: one with a fixed seed).

    coordinates [B, H, N, R], labels [B, H, N] (-1: not a candidate)
    -> rows [B, H, M] int64, weights [B, H, M] fp32 = |group| / probes in the group
    """
    count = min(count, labels.shape[-1])
    if policy == "stratified":
        rank = _radial_rank(coordinates, labels, groups, backend or Backend())
        turn = torch.where(labels >= 0, rank * groups + labels, torch.iinfo(torch.long).max)
        rows = turn.topk(count, dim=-1, largest=False, sorted=True).indices
    elif policy == "uniform":
        candidates = (labels < 0).to(torch.uint8).argsort(dim=-1, stable=True)  # those with a group first
        among = (labels >= 0).sum(-1, keepdim=True).clamp(min=count)
        rows = candidates.gather(-1, torch.arange(count, device=labels.device) * among // max(1, count))
    elif policy == "random":
        generator = generator or torch.Generator().manual_seed(0)
        drawn = torch.rand(labels.shape, generator=generator, device=generator.device).to(labels.device)
        rows = torch.where(labels < 0, 2.0, drawn).topk(count, dim=-1, largest=False).indices
    else:
        raise InputError(f"policy={policy!r}: wanted 'stratified', 'uniform' or 'random'")
    return rows, coverage_weights(rows, labels, groups)


def coverage_weights(rows: Tensor, labels: Tensor, groups: int) -> Tensor:
    """|G_a| / m_a for every probe of group a, so that the probes of a group together stand for its size;
    0 for a row of no group.  # [B, H, M] fp32"""
    sizes = count_labels(labels, groups)
    chosen = labels.gather(-1, rows)  # [B, H, M]
    probes = count_labels(chosen, groups)
    group = chosen.clamp(min=0)
    weights = sizes.gather(-1, group) / probes.gather(-1, group).clamp(min=1)
    return torch.where(chosen >= 0, weights, 0.0)


def take_probes(call: Call, grouping: Grouping, count: int, policy: str, backend: Backend) -> Probes:
    """Selects the probes among the free query rows and evaluates them against every key."""
    labels = call.free_queries.take(grouping.query.labels, 2)
    groups = grouping.query.groups
    rows, weights = select(grouping.coordinates, labels, groups, count, policy, backend=backend)
    rows = call.free_queries.index(call.q.device)[rows]
    exact = backend.attend_rows(backend.gather_rows(call.q, rows), call.k, call.v, call.key_mask, call.scale)
    return Probes(rows, weights, exact)


def _radial_rank(coordinates: Tensor, labels: Tensor, groups: int, backend: Backend) -> Tensor:
    """Position of every row in its group's order of distance to the group's mean.  # [B, H, N]"""
    counts = count_labels(labels, groups)
    means = group_sums(coordinates, labels, counts) / counts.clamp(min=1)[..., None]
    own = backend.gather_rows(means, labels.clamp(min=0))  # [B, H, N, R]
    distance = (coordinates - own).norm(dim=-1)  # [B, H, N]

    bins = torch.where(labels < 0, groups, labels)
    by_distance = distance.argsort(dim=-1, stable=True)
    by_group = bins.gather(-1, by_distance).argsort(dim=-1, stable=True)
    order = by_distance.gather(-1, by_group)  # group by group, nearest first
    first = torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
    place = torch.arange(labels.shape[-1], device=labels.device).expand_as(labels)
    rank = torch.empty_like(labels).scatter_(-1, order, place)
    return rank - first.gather(-1, bins)

"""What skipped cells contribute, computed from the means of their keys and values, and how it joins the exact part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Route
from .task import Task


@dataclass(frozen=True)
class SkippedPart:
    """The skipped part of every row, as if each key lay at its group's mean."""

    out: Tensor  # [B, H, Nq, Dv] softmax over the skipped groups; 0 for a row that skips nothing
    lse: Tensor  # [B, H, Nq] log of its mass; -inf for a row that skips nothing


def skipped_part(task: Task, route: Route) -> SkippedPart:
    """Every row against the means of the groups it skips: log-mass scale * q.kbar + log size, value vbar."""
    keys = task.backend.group_means(task.k, route.kv)  # [B, H, Ck, D]
    values = task.backend.group_means(task.v, route.kv)  # [B, H, Ck, Dv]
    size = route.kv.sizes.log()[..., None, :].expand_as(route.cells)  # -inf where empty
    hidden = torch.where(route.cells, -torch.inf, size)  # [B, H, Cq, Ck]
    out = task.q.new_zeros(*task.q.shape[:3], values.shape[-1])
    lse = task.q.new_full(task.q.shape[:3], -torch.inf)
    for b, h, rows in task.strips(task.rows, route.kv.groups):
        logits = task.scale * task.q[b, h, rows] @ keys[b, h].mT + hidden[b, h, route.query.labels[b, h, rows]]
        lse[b, h, rows] = logits.logsumexp(-1)
        out[b, h, rows] = torch.nan_to_num(logits.softmax(-1), nan=0.0) @ values[b, h]
    return SkippedPart(out, lse)


def merge(out: Tensor, lse: Tensor, skipped: SkippedPart) -> tuple[Tensor, Tensor]:
    """One softmax over the exact and the skipped part -> output, share of the skipped part [B, H, Nq]."""
    share = torch.sigmoid(skipped.lse - lse)
    return out + share[..., None] * (skipped.out - out), share


def skipped_products(task: Task, route: Route) -> int:
    """Products of rows with the centroids of the groups that they skip."""
    skipped = (~route.cells & (route.kv.sizes > 0)[..., None, :]).sum(-1)  # [B, H, Cq]
    return int((skipped * route.query.sizes).sum())

"""SpargeAttn: blocks of neighbouring tokens, predicted from their means."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..types import Partition
from .base import Outcome, Rival, Task, register
from .selection import blocks, centroid_scores, in_order, share_before


def self_similarity(task: Task, x: Tensor, partition: Partition) -> Tensor:
    """Mean cosine over all pairs of rows of a block.  # [B, H, C]"""
    unit = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return task.backend.group_means(unit, partition).square().sum(-1)


@register
class Sparge(Rival):
    """The attention between the blocks' means predicts the mass of each cell; top-cdf per query block."""

    name = "sparge"
    title = "SpargeAttn, block means"
    source = "J. Zhang et al., SpargeAttention, 2025, arXiv:2502.18137"
    simplified = (
        "the cdf is what meets the target in each head; tile order instead of the Hilbert curve; no "
        "self-similarity gate, no second filter inside the kernel, no quantisation"
    )
    alike: ClassVar[float] = -1.0  # mean cosine below which a block's mean is not trusted

    def places(self, task: Task, query: Partition, kv: Partition) -> Tensor:
        """The order of the cells: the predicted share before a cell, as for top-p, minus one in the rows and
        columns of blocks whose rows differ much, which puts those first.  # [B, H, Cq, Ck]"""
        before = share_before(centroid_scores(task, query, kv))
        rows = self_similarity(task, task.q, query) >= self.alike  # [B, H, Cq]
        columns = self_similarity(task, task.k, kv) >= self.alike  # [B, H, Ck]
        return torch.where(rows[..., :, None] & columns[..., None, :], before, before - 1.0)

    def run(self, task: Task) -> Outcome:
        query_groups, kv_groups = task.group_counts
        with task.stage("grouping"):
            query, kv = blocks(task, task.q, query_groups), blocks(task, task.k, kv_groups)
        with task.stage("routing"):
            route = in_order(task, self.places(task, query, kv), query, kv)
        out, lse = task.attend(route)
        prediction = task.heads * (query.groups * kv.groups + task.rows + task.keys)
        return Outcome.routed(out, lse, route, {"prediction": prediction})


@register
class SpargeGate(Sparge):
    """The same with the self-similarity gate: blocks whose rows differ much come first, because their means
    say nothing."""

    name = "sparge-gate"
    title = "SpargeAttn, with its gate"
    simplified = (
        "the gate is a priority inside the budget, not an exemption from it, with one threshold for all "
        "heads instead of tuned ones; the rest as without the gate"
    )
    alike = 0.5

"""SpargeAttn: blocks of neighbouring tokens, predicted from their means."""

from typing import ClassVar

import torch
from torch import Tensor

from ..types import Partition, Route
from .groups import blocks
from .methods import METHODS, Method
from .selection import centroid_scores, in_order, share_before
from .task import Task


def self_similarity(task: Task, x: Tensor, partition: Partition) -> Tensor:
    """Mean cosine over all pairs of rows of a block.  # [B, H, C]"""
    unit = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return task.backend.group_means(unit, partition).square().sum(-1)


@METHODS.register
class Sparge(Method):
    """The attention between the blocks' means predicts the mass of each cell; top-cdf per query block."""

    name = "sparge"
    title = "SpargeAttn, block means"
    source = "J. Zhang et al., SpargeAttention, 2025, arXiv:2502.18137"
    simplified = (
        "the cdf is what meets the target in each head; tile order instead of the Hilbert curve; no "
        "self-similarity gate, no second filter inside the kernel, no quantisation"
    )
    min_cosine: ClassVar[float] = -1.0  # the mean of a block whose rows are less alike is not trusted

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        return blocks(task)

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        """In the order of the predicted share before a cell, as for top-p, minus one in the rows and columns of blocks
        whose means are not trusted, which puts those first."""
        before = share_before(centroid_scores(task, query, kv))
        rows = self_similarity(task, task.q, query) >= self.min_cosine  # [B, H, Cq]
        columns = self_similarity(task, task.k, kv) >= self.min_cosine  # [B, H, Ck]
        place = torch.where(rows[..., :, None] & columns[..., None, :], before, before - 1.0)
        return in_order(task, place, query, kv), task.heads * (query.groups * kv.groups + task.rows + task.keys)


@METHODS.register
class SpargeGate(Sparge):
    """The same with the self-similarity gate: blocks whose rows differ much come first, because their means say
    nothing."""

    name = "sparge-gate"
    title = "SpargeAttn, with its gate"
    simplified = (
        "the gate is a priority inside the budget, not an exemption from it, with one threshold for all "
        "heads instead of tuned ones; the rest as without the gate"
    )
    min_cosine = 0.5

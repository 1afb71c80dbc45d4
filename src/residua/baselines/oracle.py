"""The oracle: the best possible cells of a partition, chosen by their true attention mass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Partition
from .base import Outcome, Rival, Task, register
from .response import grouping_products, response_groups, settings
from .selection import best_per_pair

CHUNK = 1 << 23  # logits at a time


def true_mass(task: Task, query: Partition, kv: Partition) -> Tensor:
    """Attention mass of every cell, summed over its rows; only some rows of the map are in memory at a time.

    -> [B, H, Cq, Ck] fp64
    """
    mass = task.q.new_zeros(*task.q.shape[:2], query.groups, kv.groups, dtype=torch.double)
    step = max(1, CHUNK // task.keys)
    for b, h in torch.cartesian_prod(*map(torch.arange, task.q.shape[:2])).tolist():
        columns = kv.labels[b, h]
        for first in range(0, task.rows, step):
            part = slice(first, first + step)
            weights = (task.scale * task.q[b, h, part] @ task.k[b, h].mT).softmax(-1)  # [step, Nk]
            shares = weights.new_zeros(len(weights), kv.groups).index_add_(1, columns, weights)
            mass[b, h].index_add_(0, query.labels[b, h, part], shares.double())
    return mass


@register
class Oracle(Rival):
    """SparsePR's groups with the cells that hold the most true mass per pair. It needs dense attention to
    know them, so its time means nothing; it shows how much better routing alone could be."""

    name = "oracle"
    title = "oracle routing"
    source = "a bound, not a method; the partition is SparsePR's"
    reference = True

    def run(self, task: Task) -> Outcome:
        config = settings(task, "none")
        grouping = response_groups(task, config)
        query, kv = grouping.query, grouping.kv
        share = true_mass(task, query, kv) / query.sizes.clamp(min=1)[..., None]  # mean over its rows
        route = best_per_pair(task, share.log(), query, kv)
        out, lse = task.attend(route)
        products = {"prediction": task.possible, "grouping": grouping_products(task, config)}
        return Outcome.routed(out, lse, route, products)

"""The ways in which methods spend a budget of pairs on cells.

Every way is an order of the cells: they are taken in that order while they fit, so a method stops where the budget
ends. A threshold that a paper tunes (such as a cumulative probability) therefore gets the value that meets the target.
"""

import torch
from torch import Tensor

from ..types import Partition, Route
from .task import Task


def centroid_scores(task: Task, query: Partition, kv: Partition) -> Tensor:
    """Log-mass of every cell if each group lay at its centroid: scale * qbar.kbar + log size; -inf for an empty K/V
    group.  # [B, H, Cq, Ck] fp32"""
    queries, keys = task.means(query, kv)
    return task.scale * queries @ keys.mT + kv.sizes.log()[..., None, :]


def best_per_pair(task: Task, log_gain: Tensor, query: Partition, kv: Partition) -> Route:
    """Cells with the most gain of a row per key first, over all cells of a head. `log_gain` [B, H, Cq, Ck]"""
    return Route(query, kv, task.backend.best_cells(log_gain, query.sizes, kv.sizes, [task.budget], shares=True)[0])


def in_order(task: Task, place: Tensor, query: Partition, kv: Partition) -> Route:
    """Cells with the lowest `place` [B, H, Cq, Ck] first."""
    # `best_cells` divides by the keys of a cell, which is undone here because the order is given
    value = -place.double() + kv.sizes.clamp(min=1).double().log()[..., None, :]
    return best_per_pair(task, value, query, kv)


def top_p(task: Task, log_mass: Tensor, query: Partition, kv: Partition) -> Route:
    """Each query group keeps its heaviest groups up to a cumulative share p; a head has one p, the largest that fits
    the budget."""
    return in_order(task, share_before(log_mass), query, kv)


def equal_budget(task: Task, log_mass: Tensor, query: Partition, kv: Partition) -> Route:
    """Each query group keeps its heaviest groups up to a number of keys, which is the same within a head."""
    keys = kv.sizes[..., None, :].expand_as(log_mass).double()
    return in_order(task, _before(log_mass, keys), query, kv)


def share_before(log_mass: Tensor) -> Tensor:
    """For every cell, the total share of the heavier cells of its query group.  # [B, H, Cq, Ck] fp64"""
    return _before(log_mass, log_mass.double().softmax(-1))


def _before(score: Tensor, amount: Tensor) -> Tensor:
    """For every cell, the sum of `amount` over the better cells of its row."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    ranked = amount.gather(-1, order)
    return torch.zeros_like(ranked).scatter_(-1, order, ranked.cumsum(-1) - ranked)

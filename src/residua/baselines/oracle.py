"""What the others are measured by: dense attention, and the best possible cells of a partition."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import Partition, Route
from .groups import response_groups, response_products
from .methods import METHODS, Method
from .selection import best_per_pair
from .task import Outcome, Task


@METHODS.register
class Dense(Method):
    """Every row against every key, by PyTorch's own kernel."""

    name = "dense"
    title = "dense (SDPA)"
    source = "A. Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762; the kernel is PyTorch's"
    reference = True

    def run(self, task: Task) -> Outcome:
        out = F.scaled_dot_product_attention(task.q, task.k, task.v, scale=task.scale)
        return Outcome(out, {"routed": task.possible})


def true_mass(task: Task, query: Partition, kv: Partition) -> Tensor:
    """Attention mass of every cell, summed over its rows.  # [B, H, Cq, Ck] fp64"""
    mass = task.q.new_zeros(*task.q.shape[:2], query.groups, kv.groups, dtype=torch.double)
    for b, h, part in task.strips(task.rows, task.keys):
        weights = (task.scale * task.q[b, h, part] @ task.k[b, h].mT).softmax(-1)  # [n, Nk]
        shares = weights.new_zeros(len(weights), kv.groups).index_add_(1, kv.labels[b, h], weights)
        mass[b, h].index_add_(0, query.labels[b, h, part], shares.double())
    return mass


@METHODS.register
class Oracle(Method):
    """SparsePR's groups with the cells that hold the most true mass per pair. It needs dense attention to know them, so
    its time means nothing; it shows how much better routing alone could be."""

    name = "oracle"
    title = "oracle routing"
    source = "a bound, not a method; the partition is SparsePR's"
    reference = True

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        config = task.on_equal_terms(task.config.replace(reconstruction="none"))
        grouping = response_groups(task, config)
        return grouping.query, grouping.kv, response_products(task, config)

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        share = true_mass(task, query, kv) / query.sizes.clamp(min=1)[..., None]  # mean over its rows
        return best_per_pair(task, share.log(), query, kv), task.possible

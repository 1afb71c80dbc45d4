"""SVG-EAR: semantic groups; skipped cells are replaced by centroids; cells with a large error of that are
computed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Partition
from .base import Outcome, Rival, Task, register
from .compensation import merge, skipped_part, skipped_products
from .selection import best_per_pair
from .semantic import semantic_groups

CHUNK = 1 << 22  # logits at a time


def compensation_error(task: Task, query: Partition, kv: Partition) -> Tensor:
    """How far the attention weights of every K/V group are from equal weights at the group's centroid, seen
    from the centroid of every query group: sum_j |p_aj - phat_ab|.  # [B, H, Cq, Ck]"""
    anchors, keys = task.means(query, kv)
    error = task.q.new_zeros(*task.q.shape[:2], query.groups, kv.groups)
    step = max(1, CHUNK // task.keys)
    for b, h in torch.cartesian_prod(*map(torch.arange, task.q.shape[:2])).tolist():
        labels = kv.labels[b, h]
        for first in range(0, query.groups, step):
            part = (b, h, slice(first, first + step))
            logits = task.scale * anchors[part] @ task.k[b, h].mT  # [step, Nk]
            norm = logits.logsumexp(-1, keepdim=True)
            at_mean = (task.scale * anchors[part] @ keys[b, h].mT - norm).exp()  # [step, Ck]
            off = ((logits - norm).exp() - at_mean[:, labels]).abs()
            error[part] = torch.zeros_like(at_mean).index_add_(1, labels, off)
    return error


@register
class SvgEar(Rival):
    """Each skipped cell adds its mean key and mean value, weighted by its size. Computed are the cells for
    which this replacement has the most error per pair, not those with the most mass."""

    name = "svg-ear"
    title = "SVG-EAR"
    source = "Zhou et al., SVG-EAR: Parameter-Free Linear Compensation, 2026, arXiv:2603.08982"
    simplified = "the error of a cell is read at the query group's centroid over all keys"

    def run(self, task: Task) -> Outcome:
        with task.stage("grouping"):
            query, kv, grouping = semantic_groups(task)
        with task.stage("routing"):
            route = best_per_pair(task, compensation_error(task, query, kv).log(), query, kv)
        out, lse = task.attend(route)
        with task.stage("reconstruction"):
            skipped = skipped_part(task, route)
            merged, _ = merge(out, lse, skipped)
        products = {
            "prediction": task.heads * query.groups * (task.keys + kv.groups),
            "compensation": skipped_products(task, route),
            "grouping": grouping,
        }
        return Outcome.routed(merged, lse, route, products, skipped.lse)

"""SVG-EAR: semantic groups; skipped cells are replaced by centroids; cells with a large error of that are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Partition, Route
from .compensation import merge, skipped_part, skipped_products
from .methods import METHODS
from .selection import best_per_pair
from .svg2 import Svg2
from .task import Task


def compensation_error(task: Task, query: Partition, kv: Partition) -> Tensor:
    """How far the attention weights of every K/V group are from equal weights at the group's centroid, seen from the
    centroid of every query group: sum_j |p_aj - phat_ab|.  # [B, H, Cq, Ck]"""
    anchors, keys = task.means(query, kv)
    error = task.q.new_zeros(*task.q.shape[:2], query.groups, kv.groups)
    for part in task.strips(query.groups, task.keys):
        b, h, _ = part
        labels = kv.labels[b, h]
        logits = task.scale * anchors[part] @ task.k[b, h].mT  # [n, Nk]
        norm = logits.logsumexp(-1, keepdim=True)
        at_mean = (task.scale * anchors[part] @ keys[b, h].mT - norm).exp()  # [n, Ck]
        off = ((logits - norm).exp() - at_mean[:, labels]).abs()
        error[part] = torch.zeros_like(at_mean).index_add_(1, labels, off)
    return error


@METHODS.register
class SvgEar(Svg2):
    """Each skipped cell adds its mean key and mean value, weighted by its size. Computed are the cells for which this
    replacement has the most error per pair, not those with the most mass."""

    name = "svg-ear"
    title = "SVG-EAR"
    source = "Zhou et al., SVG-EAR: Parameter-Free Linear Compensation, 2026, arXiv:2603.08982"
    simplified = "the error of a cell is read at the query group's centroid over all keys"

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        route = best_per_pair(task, compensation_error(task, query, kv).log(), query, kv)
        return route, task.heads * query.groups * (task.keys + kv.groups)

    def reconstruct(self, task: Task, route: Route, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None, int]:
        with task.stage("reconstruction"):
            skipped = skipped_part(task, route)
            merged, _ = merge(out, lse, skipped)
        return merged, skipped.lse, skipped_products(task, route)

"""SVG-EAR: semantic groups; skipped cells are replaced by centroids; cells with a large error of that are computed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Partition, Route
from .methods import METHODS
from .selection import best_per_pair
from .svg2 import Svg2
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

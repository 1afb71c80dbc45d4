"""PISA-type attention: skipped blocks of tokens enter through a Taylor expansion at their mean key."""

from itertools import pairwise

import torch
from torch import Tensor

from ..types import Partition, Route
from .groups import blocks
from .methods import METHODS, Method
from .selection import centroid_scores, top_p
from .svg_ear import merge, skipped_part, skipped_products
from .task import Task


def covariances(task: Task, kv: Partition) -> Tensor:
    """Mean of (k - kbar)(v - vbar)^T over every group: the first-order term of its expansion.

    -> [B, H, Ck, D, Dv]
    """
    keys, values = task.backend.group_means(task.k, kv), task.backend.group_means(task.v, kv)
    slopes = task.k.new_zeros(*kv.sizes.shape, task.k.shape[-1], task.v.shape[-1])
    for b, h in task.each_head:
        ends = kv.offsets[b, h].tolist()
        for g, (first, last) in enumerate(pairwise(ends)):
            if last > first:
                members = kv.order[b, h, first:last]
                k, v = task.k[b, h, members] - keys[b, h, g], task.v[b, h, members] - values[b, h, g]
                slopes[b, h, g] = k.mT @ v / (last - first)
    return slopes


def shared_slope(score: Tensor, route: Route, slopes: Tensor) -> Tensor:
    """One first-order term per query group: that of its skipped blocks, weighted by their predicted mass.

    score [B, H, Cq, Ck], slopes [B, H, Ck, D, Dv] -> [B, H, Cq, D, Dv]
    """
    weights = torch.where(route.cells, -torch.inf, score).softmax(-1)
    weights = torch.nan_to_num(weights, nan=0.0)  # a group that skips nothing
    return (weights @ slopes.flatten(-2)).unflatten(-1, slopes.shape[-2:])


def taylor(task: Task, route: Route, out: Tensor, lse: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """The kept cells, which are exact, and the skipped ones expanded: exp(q.k) = exp(q.kbar)(1 + q.(k - kbar)). To
    first order the mass of a group is that of its mean, and its value is vbar + scale * q Cov(k, v).

    -> output [B, H, Nq, Dv], log of the mass that is added [B, H, Nq]
    """
    skipped = skipped_part(task, route)
    merged, share = merge(out, lse, skipped)
    if order > 0:
        slope = shared_slope(centroid_scores(task, route.query, route.kv), route, covariances(task, route.kv))
        for b, h in task.each_head:
            for a, (first, last) in enumerate(pairwise(route.query.offsets[b, h].tolist())):
                rows = route.query.order[b, h, first:last]
                off = task.scale * task.q[b, h, rows] @ slope[b, h, a]
                merged[b, h, rows] += share[b, h, rows, None] * off
    return merged, skipped.lse


@METHODS.register
class Pisa(Method):
    """Skipped blocks are approximated instead of dropped: the zeroth order is computed per block, the first order is
    shared by the skipped blocks of a query block."""

    name = "pisa"
    title = "PISA-type Taylor"
    source = "H. Li et al., PISA: Piecewise Sparse Attention, 2026, arXiv:2602.01077"
    simplified = (
        "cells by top-p on block means, in tile order; the first-order terms of a query block's skipped "
        "blocks are averaged with their predicted mass; no fused kernel"
    )

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        return blocks(task)

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        route = top_p(task, centroid_scores(task, query, kv), query, kv)
        return route, task.heads * (query.groups * kv.groups + task.rows + task.keys)

    def reconstruct(self, task: Task, route: Route, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None, int]:
        with task.stage("reconstruction"):
            merged, added = taylor(task, route, out, lse, order=1)
        # rows times slopes, slopes of the blocks, and their weighted means
        first_order = (task.rows + task.keys + route.query.groups * route.kv.groups) * task.v.shape[-1]
        return merged, added, skipped_products(task, route) + task.heads * first_order

"""PISA-type attention: skipped blocks of tokens enter through a Taylor expansion at their mean key."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..types import Partition, Route
from .base import Outcome, Rival, Task, register
from .compensation import merge, skipped_part, skipped_products
from .selection import blocks, centroid_scores, top_p


def covariances(task: Task, kv: Partition) -> Tensor:
    """Mean of (k - kbar)(v - vbar)^T over every group: the first-order term of its expansion.

    -> [B, H, Ck, D, Dv]
    """
    keys, values = task.backend.group_means(task.k, kv), task.backend.group_means(task.v, kv)
    slopes = task.k.new_zeros(*kv.sizes.shape, task.k.shape[-1], task.v.shape[-1])
    for b, h in torch.cartesian_prod(*map(torch.arange, task.q.shape[:2])).tolist():
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


def taylor(task: Task, route: Route, score: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the kept cells exact and the skipped ones expanded: exp(q.k) = exp(q.kbar)(1 + q.(k -
    kbar)). To first order the mass of a group is that of its mean, and its value is vbar + scale * q Cov(k,
    v).

    -> output [B, H, Nq, Dv], log-sum-exp of the exact part, and of the added part
    """
    out, lse = task.attend(route)
    with task.stage("reconstruction"):
        skipped = skipped_part(task, route)
        merged, share = merge(out, lse, skipped)
        if order > 0:
            _add_first_order(task, route, score, merged, share)
    return merged, lse, skipped.lse


def _add_first_order(task: Task, route: Route, score: Tensor, merged: Tensor, share: Tensor) -> None:
    """Adds, in place, the contribution of the deviation of skipped keys from their means."""
    slope = shared_slope(score, route, covariances(task, route.kv))
    for b, h in torch.cartesian_prod(*map(torch.arange, task.q.shape[:2])).tolist():
        for a in range(route.query.groups):
            ends = route.query.offsets[b, h, a : a + 2].tolist()
            rows = route.query.order[b, h, ends[0] : ends[1]]
            first = task.scale * task.q[b, h, rows] @ slope[b, h, a]
            merged[b, h, rows] += share[b, h, rows, None] * first


@register
class Pisa(Rival):
    """Skipped blocks are approximated instead of dropped: the zeroth order is computed per block, the first
    order is shared by the skipped blocks of a query block."""

    name = "pisa"
    title = "PISA-type Taylor"
    source = "H. Li et al., PISA: Piecewise Sparse Attention, 2026, arXiv:2602.01077"
    simplified = (
        "cells by top-p on block means, in tile order; the first-order terms of a query block's skipped "
        "blocks are averaged with their predicted mass; no fused kernel"
    )

    def run(self, task: Task) -> Outcome:
        query_groups, kv_groups = task.group_counts
        with task.stage("grouping"):
            query, kv = blocks(task, task.q, query_groups), blocks(task, task.k, kv_groups)
        with task.stage("routing"):
            score = centroid_scores(task, query, kv)
            route = top_p(task, score, query, kv)
        out, lse, added = taylor(task, route, score, order=1)
        width = task.v.shape[-1]
        # rows times slopes, slopes of the blocks, and their weighted means
        first_order = task.rows * width + task.keys * width + query.groups * kv.groups * width
        products = {
            "prediction": task.heads * (query.groups * kv.groups + task.rows + task.keys),
            "compensation": skipped_products(task, route) + task.heads * first_order,
        }
        return Outcome.routed(out, lse, route, products, added)

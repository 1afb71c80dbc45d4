"""SVOO: queries and keys are grouped in turn, each by how they respond to the other's groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ..method.grouping.kmeans import first_centres, kmeans
from ..method.grouping.response import metric_factor
from ..types import Partition
from .base import Outcome, Rival, Task, register
from .selection import centroid_scores, kmeans_products, top_p
from .semantic import STEPS as START_STEPS
from .semantic import cluster

ROUNDS, WARM_ROUNDS = 3, 1
STEPS = 4  # of k-means, per side and round


def affinity_groups(task: Task, x: Tensor, groups: int, others: Tensor, start: Tensor | None) -> Partition:
    """K-means of the rows of x by their products with the other side's centroids [B, H, C, D].

    The distance of two vectors of products is |others (x_i - x_j)|, so it is computed through the D x D Gram
    matrix of the centroids: the same groups at less cost.
    """
    factor = metric_factor(others.mT @ others, x.shape[-1], task.backend)  # [B, H, D, D]
    coordinates = (x @ factor).flatten(0, 1)
    centres = first_centres(coordinates, groups, None) if start is None else (start @ factor).flatten(0, 1)
    found = kmeans(coordinates, groups, STEPS, start=centres, backend=task.backend)
    return Partition.from_labels(found.labels.unflatten(0, x.shape[:2]), groups)


def co_cluster(task: Task) -> tuple[Partition, Partition, int]:
    """Query groups, K/V groups, and the number of rounds; one round if an earlier call stored its
    centroids."""
    query_groups, kv_groups = task.group_counts
    heads, dim = task.q.shape[:2], task.q.shape[-1]
    queries = task.start("queries", (*heads, query_groups, dim))
    keys = task.start("keys", (*heads, kv_groups, dim))
    rounds = ROUNDS if queries is None else WARM_ROUNDS
    if queries is None:
        queries = task.backend.group_means(task.q, cluster(task, task.q, query_groups, "start"))
    for _ in range(rounds):
        kv = affinity_groups(task, task.k, kv_groups, queries, keys)
        keys = _centroids(task, task.k, kv, keys)
        query = affinity_groups(task, task.q, query_groups, keys, queries)
        queries = _centroids(task, task.q, query, queries)
    assert keys is not None
    task.leave("queries", queries)
    task.leave("keys", keys)
    return query, kv, rounds


def _centroids(task: Task, x: Tensor, partition: Partition, before: Tensor | None) -> Tensor:
    """Means of the groups; an empty group keeps its old mean."""
    means = task.backend.group_means(x, partition)
    return means if before is None else torch.where(partition.sizes[..., None] > 0, means, before)


@register
class Svoo(Rival):
    """Alternating co-clustering; then cells chosen by the attention between centroids, top-p per query
    group."""

    name = "svoo"
    title = "SVOO"
    source = "J. Luo et al., Training-Free Sparse Attention (SVOO), 2026, arXiv:2603.18636"
    simplified = (
        "no offline profile: every call has the same density; three rounds, affinities not normalised, "
        "queries start from k-means on activations"
    )

    def run(self, task: Task) -> Outcome:
        with task.stage("grouping"):
            query, kv, rounds = co_cluster(task)
        with task.stage("routing"):
            route = top_p(task, centroid_scores(task, query, kv), query, kv)
        out, lse = task.attend(route)
        dim, (query_groups, kv_groups) = task.q.shape[-1], task.group_counts
        grouping = rounds * (
            kmeans_products(task.rows, query_groups, STEPS, dim, dim)
            + kmeans_products(task.keys, kv_groups, STEPS, dim, dim)
            + (task.rows + task.keys) * dim
        )
        if rounds == ROUNDS:  # products of the first grouping of the queries
            grouping += kmeans_products(task.rows, query_groups, START_STEPS, dim, dim)
        products = {"prediction": task.heads * query_groups * kv_groups, "grouping": task.heads * grouping}
        return Outcome.routed(out, lse, route, products)

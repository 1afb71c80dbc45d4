"""SVOO: queries and keys are grouped in turn, each by how they respond to the other's groups."""

import torch
from torch import Tensor

from ..method.grouping.partition import first_centres, kmeans, metric_factor
from ..method.rules import choose_rules
from ..types import Partition
from .groups import cluster, kmeans_products
from .methods import METHODS
from .svg2 import Svg2
from .task import Task

ROUNDS, WARM_ROUNDS = 3, 1
STEPS = 4  # of k-means, per side and round


def affinity_groups(task: Task, x: Tensor, groups: int, others: Tensor, start: Tensor | None) -> Partition:
    """K-means of the rows of x by their products with the other side's centroids [B, H, C, D].

    The distance of two vectors of products is |others (x_i - x_j)|, so it is computed through the D x D Gram
    matrix of the centroids: the same groups at less cost.
    """
    rules = choose_rules(task.config, task.call)
    factor = metric_factor(others.mT @ others, x.shape[-1], rules, task.backend)  # [B, H, D, D]
    coordinates = (x @ factor).flatten(0, 1)
    centres = first_centres(coordinates, groups, None) if start is None else (start @ factor).flatten(0, 1)
    found = kmeans(coordinates, groups, STEPS, start=centres, backend=task.backend)
    return Partition.from_labels(found.labels.unflatten(0, x.shape[:2]), groups)


def _centroids(task: Task, x: Tensor, partition: Partition, before: Tensor | None) -> Tensor:
    """Means of the groups; an empty group keeps its old mean."""
    means = task.backend.group_means(x, partition)
    return means if before is None else torch.where(partition.sizes[..., None] > 0, means, before)


@METHODS.register
class Svoo(Svg2):
    """Alternating co-clustering; then cells chosen as in SVG2."""

    name = "svoo"
    title = "SVOO"
    source = "J. Luo et al., Training-Free Sparse Attention (SVOO), 2026, arXiv:2603.18636"
    simplified = (
        "no offline profile: every call has the same density; three rounds, affinities not normalised, "
        "queries start from k-means on activations"
    )

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        """One round if an earlier call stored its centroids."""
        (query_groups, kv_groups), dim = task.group_counts, task.q.shape[-1]
        queries = task.start("queries", (*task.q.shape[:2], query_groups, dim))
        keys = task.start("keys", (*task.q.shape[:2], kv_groups, dim))
        rounds, products = WARM_ROUNDS, 0
        if queries is None:
            rounds = ROUNDS
            query, products = cluster(task, task.q, query_groups, "start")
            queries = task.backend.group_means(task.q, query)
        for _ in range(rounds):
            kv = affinity_groups(task, task.k, kv_groups, queries, keys)
            keys = _centroids(task, task.k, kv, keys)
            query = affinity_groups(task, task.q, query_groups, keys, queries)
            queries = _centroids(task, task.q, query, queries)
            products += kmeans_products(task.rows, query_groups, STEPS, dim, dim)
            products += kmeans_products(task.keys, kv_groups, STEPS, dim, dim) + (task.rows + task.keys) * dim
        assert keys is not None
        task.leave("queries", queries)
        task.leave("keys", keys)
        return query, kv, task.heads * products

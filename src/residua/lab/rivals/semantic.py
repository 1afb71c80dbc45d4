"""K-means on the activations of queries and keys, each for itself: what SVG2 and SVG-EAR group by."""

from __future__ import annotations

from torch import Tensor

from ...grouping.kmeans import kmeans
from ...types import Partition
from .base import Task
from .selection import kmeans_products

STEPS = 25  # as many as Residua takes in the first call of a run


def cluster(task: Task, x: Tensor, groups: int) -> Partition:
    """Groups of the rows of x [B, H, N, D]."""
    found = kmeans(x.flatten(0, 1), groups, STEPS, backend=task.backend)
    return Partition.from_labels(found.labels.unflatten(0, x.shape[:2]), groups)


def semantic_groups(task: Task) -> tuple[Partition, Partition, int]:
    """Query groups, K/V groups, and the products it took to find them."""
    query_groups, kv_groups = task.group_counts
    dim = task.q.shape[-1]
    products = kmeans_products(task.rows, query_groups, STEPS, dim, dim)
    products += kmeans_products(task.keys, kv_groups, STEPS, dim, dim)
    query = cluster(task, task.q, query_groups)
    return query, cluster(task, task.k, kv_groups), task.heads * products

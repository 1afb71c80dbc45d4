"""K-means on the activations of queries and of keys, separately: the groups of SVG2 and SVG-EAR."""

from __future__ import annotations

from torch import Tensor

from ..method.grouping.kmeans import kmeans
from ..types import Partition
from .base import Task
from .selection import kmeans_products

STEPS, WARM_STEPS = 25, 2  # the same as Residua's in the first call of a run, and in later ones


def steps_of(task: Task, x: Tensor, groups: int, name: str) -> int:
    """How many steps `cluster` takes: few if an earlier call stored its centres under this name."""
    return STEPS if task.start(name, _shape(x, groups)) is None else WARM_STEPS


def cluster(task: Task, x: Tensor, groups: int, name: str) -> Partition:
    """Groups of the rows of x [B, H, N, D]."""
    steps = steps_of(task, x, groups, name)
    start = task.start(name, _shape(x, groups))
    start = None if start is None else start.flatten(0, 1)
    found = kmeans(x.flatten(0, 1), groups, steps, start=start, backend=task.backend)
    task.leave(name, found.centres.unflatten(0, x.shape[:2]))
    return Partition.from_labels(found.labels.unflatten(0, x.shape[:2]), groups)


def semantic_groups(task: Task) -> tuple[Partition, Partition, int]:
    """Query groups, K/V groups, and the products needed to find them."""
    query_groups, kv_groups = task.group_counts
    dim = task.q.shape[-1]
    steps = steps_of(task, task.q, query_groups, "queries"), steps_of(task, task.k, kv_groups, "keys")
    products = kmeans_products(task.rows, query_groups, steps[0], dim, dim)
    products += kmeans_products(task.keys, kv_groups, steps[1], dim, dim)
    query = cluster(task, task.q, query_groups, "queries")
    return query, cluster(task, task.k, kv_groups, "keys"), task.heads * products


def _shape(x: Tensor, groups: int) -> tuple[int, ...]:
    return (*x.shape[:2], groups, x.shape[-1])

"""SparsePR's groups, used by hard drop, the oracle, SparsePR itself and anchored reconstruction."""

from __future__ import annotations

from ..config import Config
from ..method.grouping.partition import group_tokens
from ..method.sizes import resolve
from ..types import Grouping
from .base import Task
from .selection import kmeans_products


def settings(task: Task, reconstruction: str) -> Config:
    query_groups, kv_groups = task.group_counts
    return Config(
        density=task.density,
        query_groups=query_groups,
        kv_groups=kv_groups,
        reconstruction=reconstruction,
        backend=task.backend_name,
    )


def response_groups(task: Task, config: Config) -> Grouping:
    return group_tokens(task.call, config, resolve(config, task.call), None, task.backend)


def grouping_products(task: Task, config: Config) -> int:
    """K-means in the response coordinates, and the projections into them."""
    sizes, dim = resolve(config, task.call), task.q.shape[-1]
    products = kmeans_products(task.rows, sizes.query_groups, config.kmeans_cold, sizes.query_rank, dim)
    products += kmeans_products(task.keys, sizes.kv_groups, config.kmeans_cold, sizes.key_rank, dim)
    return task.heads * (products + task.rows * sizes.query_rank + task.keys * sizes.key_rank)

"""Sorts tokens into groups: response coordinates, k-means, partitioners."""

from .partition import (
    PARTITIONERS,
    Clusters,
    Partitioner,
    group_tokens,
    key_metric,
    kmeans,
    metric_factor,
    query_metric,
)

__all__ = [
    "PARTITIONERS",
    "Clusters",
    "Partitioner",
    "group_tokens",
    "key_metric",
    "kmeans",
    "metric_factor",
    "query_metric",
]

"""Sorts tokens into groups: response coordinates, k-means, partitioners."""

from .kmeans import Clusters, kmeans
from .partition import PARTITIONERS, Partitioner, group_tokens
from .response import key_metric, metric_factor, query_metric

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

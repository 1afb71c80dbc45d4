"""Sorting tokens into groups: response coordinates, k-means, partitioners."""

from .kmeans import Clusters, kmeans
from .partition import PARTITIONERS, Partitioner, group_tokens, register
from .response import key_coordinates, key_metric, metric_factor, query_coordinates, query_metric

__all__ = [
    "PARTITIONERS",
    "Clusters",
    "Partitioner",
    "group_tokens",
    "key_coordinates",
    "key_metric",
    "kmeans",
    "metric_factor",
    "query_coordinates",
    "query_metric",
    "register",
]

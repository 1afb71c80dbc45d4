"""SVG2: semantic groups of queries and keys, cells chosen by the attention between centroids."""

from ..types import Partition, Route
from .groups import cluster
from .methods import METHODS, Method
from .selection import centroid_scores, equal_budget, top_p
from .task import Task


@METHODS.register
class Svg2(Method):
    """K-means on queries and on keys; the mass of a cell is that of the two centroids times the keys of the group. Each
    query group keeps its heaviest K/V groups up to a cumulative probability p; the others are dropped."""

    name = "svg2"
    title = "SVG2, top-p"
    source = "S. Yang et al., Sparse VideoGen2, 2025, arXiv:2505.18875"
    simplified = "p is what meets the target in each head, not a constant"
    choose = staticmethod(top_p)  # the cells, by their scores

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        query_groups, kv_groups = task.group_counts
        query, products = cluster(task, task.q, query_groups, "queries")
        kv, more = cluster(task, task.k, kv_groups, "keys")
        return query, kv, task.heads * (products + more)

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        route = self.choose(task, centroid_scores(task, query, kv), query, kv)
        return route, task.heads * query.groups * kv.groups


@METHODS.register
class Svg2Budget(Svg2):
    """The same; each query group keeps its heaviest K/V groups up to the same number of keys."""

    name = "svg2-budget"
    title = "SVG2, fixed budget"
    simplified = "every head has the same budget"
    choose = staticmethod(equal_budget)

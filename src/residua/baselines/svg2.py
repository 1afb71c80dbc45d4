"""SVG2: semantic groups of queries and keys, cells chosen by the attention between centroids."""

from __future__ import annotations

from ..types import Partition, Route
from .base import Outcome, Rival, Task, register
from .selection import centroid_scores, equal_budget, top_p
from .semantic import semantic_groups

SOURCE = "S. Yang et al., Sparse VideoGen2, 2025, arXiv:2505.18875"


class Svg2(Rival):
    """K-means on queries and on keys; the mass of a cell is that of the two centroids times the keys of the
    group; skipped cells are dropped."""

    source = SOURCE

    def choose(self, task: Task, query: Partition, kv: Partition) -> Route:
        raise NotImplementedError

    def run(self, task: Task) -> Outcome:
        with task.stage("grouping"):
            query, kv, grouping = semantic_groups(task)
        with task.stage("routing"):
            route = self.choose(task, query, kv)
        out, lse = task.attend(route)
        prediction = task.heads * query.groups * kv.groups
        return Outcome.routed(out, lse, route, {"prediction": prediction, "grouping": grouping})


@register
class Svg2TopP(Svg2):
    """Each query group keeps its heaviest K/V groups up to a cumulative probability p."""

    name = "svg2"
    title = "SVG2, top-p"
    simplified = "p is what meets the target in each head, not a constant"

    def choose(self, task: Task, query: Partition, kv: Partition) -> Route:
        return top_p(task, centroid_scores(task, query, kv), query, kv)


@register
class Svg2Budget(Svg2):
    """Each query group keeps its heaviest K/V groups up to the same number of keys."""

    name = "svg2-budget"
    title = "SVG2, fixed budget"
    simplified = "every head has the same budget"

    def choose(self, task: Task, query: Partition, kv: Partition) -> Route:
        return equal_budget(task, centroid_scores(task, query, kv), query, kv)

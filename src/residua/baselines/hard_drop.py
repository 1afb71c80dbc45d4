"""SparsePR's partition and routing without its reconstruction: skipped pairs are dropped."""

from __future__ import annotations

from ..method.route import route_cells
from .base import Outcome, Rival, Task, register
from .response import grouping_products, response_groups, settings


@register
class HardDrop(Rival):
    """Response-coupled groups, cells chosen by their mass at the query centroids, softmax over the kept keys
    only."""

    name = "hard-drop"
    title = "hard drop (no reconstruction)"
    source = "the SparsePR paper, section 4.1; Residua with reconstruction='none'"

    def run(self, task: Task) -> Outcome:
        config = settings(task, "none")
        grouping = response_groups(task, config)
        route = route_cells(task.call, grouping, task.density, 0, config.score, task.backend)
        out, lse = task.attend(route)
        prediction = 0 if task.density == 1.0 else task.heads * route.query.groups * task.keys
        products = {"prediction": prediction, "grouping": grouping_products(task, config)}
        return Outcome.routed(out, lse, route, products)

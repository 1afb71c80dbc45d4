"""Anchored reconstruction: what Residua does by default."""

from __future__ import annotations

from ..api import attention
from .base import Outcome, Rival, Task, register
from .response import grouping_products, settings


@register
class Anchored(Rival):
    """SparsePR's groups and routing; skipped groups enter through an expansion around the query centroids.
    The budget pays for all of it, so fewer exact pairs are left than for the others."""

    name = "anchored"
    title = "anchored (Residua)"
    source = "this project, docs/method.md; residua.Config()"
    all_in = True

    def run(self, task: Task) -> Outcome:
        config = settings(task, "anchored")
        out, receipt = attention(task.q, task.k, task.v, config, scale=task.scale, return_receipt=True)
        beside = {name: float(work.sum()) for name, work in receipt.beside.items()}
        prediction = beside.pop("routing", 0.0)
        # converted to what they are charged: a pair is D + Dv products
        products = {
            "prediction": round(prediction),
            "compensation": round(sum(beside.values())),
            "grouping": grouping_products(task, config),
        }
        pairs = {"routed": receipt.pairs.routed, "probe": receipt.pairs.probe}
        return Outcome(out, pairs, products, probe_rows=receipt.probe_rows)

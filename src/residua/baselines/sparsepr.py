"""SparsePR itself, as Residua runs it: the paper's method."""

from __future__ import annotations

from ..api import attention
from ..method.sizes import resolve
from .base import Outcome, Rival, Task, register
from .response import grouping_products, settings


@register
class SparsePR(Rival):
    """Response-coupled groups, hard drop, and a probe-fitted reconstruction of what was dropped. The same
    budget pays for the probe rows."""

    name = "paper"
    title = "SparsePR (Residua)"
    source = "Partition the Support, Reconstruct the Residual (SparsePR), 2026; residua.Config.paper()"

    def run(self, task: Task) -> Outcome:
        config = settings(task, "probe")
        out, receipt = attention(task.q, task.k, task.v, config, scale=task.scale, return_receipt=True)
        pairs = {"routed": receipt.pairs.routed, "probe": receipt.pairs.probe}
        rank, widths = resolve(config, task.call).residual_rank, task.v.shape[-1] / task.q.shape[-1]
        reconstruction = int(task.heads * task.rows * 2 * rank * widths) if receipt.pairs.probe else 0
        products = {
            "prediction": receipt.routing_products,
            "compensation": reconstruction,
            "grouping": grouping_products(task, config),
        }
        return Outcome(out, pairs, products, probe_rows=receipt.probe_rows)

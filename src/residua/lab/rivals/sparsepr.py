"""SparsePR itself, as Residua runs it."""

from __future__ import annotations

from torch import Tensor

from ...attention import attention
from ...probes import take_probes
from ...sizing import resolve
from .base import Outcome, Rival, Task, register
from .response import grouping_products, response_groups, settings


@register
class SparsePR(Rival):
    """Response-coupled groups, hard drop, and a probe-fitted reconstruction of what was dropped. The probe
    rows are paid from the same budget."""

    name = "sparsepr"
    title = "SparsePR (Residua)"
    source = "Partition the Support, Reconstruct the Residual (SparsePR), 2026; residua.attention"

    def run(self, task: Task) -> Outcome:
        config = settings(task, "probe")
        out, receipt = attention(task.q, task.k, task.v, config, scale=task.scale, return_receipt=True)
        pairs = {"routed": receipt.pairs.routed, "probe": receipt.pairs.probe}
        rank, widths = resolve(config, task.call).repair_rank, task.v.shape[-1] / task.q.shape[-1]
        repair = int(task.heads * task.rows * 2 * rank * widths) if receipt.pairs.probe else 0
        products = {
            "prediction": receipt.routing_products,
            "compensation": repair,
            "grouping": grouping_products(task, config),
        }
        return Outcome(out, pairs, products)


def probe_rows(task: Task) -> Tensor | None:
    """The rows that SparsePR computes exactly in this call, found anew: they are held out when methods are
    compared, because one of them has seen the answer.  # [B, H, M]"""
    config = settings(task, "probe")
    count = resolve(config, task.call).probes
    if not count:
        return None
    grouping = response_groups(task, config)
    return take_probes(task.call, grouping, count, config.probe_policy, task.backend).rows

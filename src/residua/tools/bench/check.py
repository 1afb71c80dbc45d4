"""Decides whether a kernel may be timed: recomputes some of its rows in fp64 over exactly the keys they
see."""

import torch
from torch import Tensor

from ...types import MAX_BEND, Call, Route, SummaryKeys
from ...util.golden import golden_indices

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # against fp64, per row
CHECK_ROWS, CHECK_HEADS = 64, 4


def kernel_error(call: Call, route: Route, out: Tensor, summary: SummaryKeys | None = None) -> float:
    """Largest relative error of some rows of some heads against fp64 over exactly the kept keys, plus the
    summary of the others if the kernel got one.

    Args:
        call: The call.
        route: Which cells were computed.
        out: [B, H, Nq, Dv], the kernel's output.
        summary: The summary keys that the rows saw.
    """
    index = golden_indices(min(CHECK_ROWS, call.q.shape[2]), call.q.shape[2], call.q.device)
    errors = []
    for h in range(min(CHECK_HEADS, call.q.shape[1])):
        g = h // call.heads_per_kv
        group = route.query.labels[0, h, index]  # [rows]
        kept = route.cells[0, h][group][:, route.kv.labels[0, g]]  # [rows, Nk]
        rows = call.q[0, h, index].double()
        logits = (rows @ call.k[0, g].double().mT * call.scale).masked_fill(~kept, -torch.inf)
        values = call.v[0, g].double().expand(len(index), -1, -1)
        if summary is not None:
            more, own = _summary_columns(summary, rows, group, call.scale, h, g)
            logits, values = torch.cat([logits, more], 1), torch.cat([values, own], 1)
        exact = (logits.softmax(-1)[:, None] @ values)[:, 0]
        errors.append((out[0, h, index].double() - exact).norm(dim=-1) / exact.norm(dim=-1))
    return float(torch.stack(errors).max())  # torch keeps NaN


def _summary_columns(
    summary: SummaryKeys, rows: Tensor, group: Tensor, scale: float, head: int, kv_head: int
) -> tuple[Tensor, Tensor]:
    """Logits and values of each row's summary keys, drift included.  # [M, T], [M, T, Dv] fp64"""
    keys, values, weight = (x[0, head].double()[group] for x in (summary.keys, summary.values, summary.log_weight))
    logits = (keys @ rows[..., None])[..., 0] * scale + weight
    drift = summary.drift
    if drift is None:
        return logits, values
    origin, curve, slope = (x[0, head].double()[group] for x in (drift.origin, drift.curve, drift.slope))
    y = rows @ drift.basis[0, kv_head].double() - origin  # [M, R]
    bend = (y * curve * y).sum(-1).clamp(max=MAX_BEND)
    return logits + bend[:, None], values + y[:, None] @ slope

"""Whether a kernel may be timed at all: some of its rows, recomputed in fp64 over exactly the kept keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..grouping.response import evenly_spaced
from ..types import Call, Route

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of a row, against fp64
CHECK_ROWS, CHECK_HEADS = 64, 4


def kernel_error(call: Call, route: Route, out: Tensor) -> float:
    """Largest relative error of some rows of some heads against fp64 over exactly the kept keys."""
    index = evenly_spaced(min(CHECK_ROWS, call.q.shape[2]), call.q.shape[2], call.q.device)
    errors = []
    for h in range(min(CHECK_HEADS, call.q.shape[1])):
        g = h // call.shares
        kept = route.cells[0, h][route.query.labels[0, h, index]][:, route.kv.labels[0, g]]  # [rows, Nk]
        logits = call.q[0, h, index].double() @ call.k[0, g].double().mT * call.scale
        exact = logits.masked_fill(~kept, -torch.inf).softmax(-1) @ call.v[0, g].double()
        errors.append((out[0, h, index].double() - exact).norm(dim=-1) / exact.norm(dim=-1))
    return float(torch.stack(errors).max())  # NaN stays NaN

"""Pure torch on any device: one query group at a time against its gathered keys, never an [N, N] matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import MAX_BEND, Route, SummaryKeys
from .backend import BACKENDS, Backend
from .plain.chunks import chunk_rows
from .plain.grouping import gather_rows


@BACKENDS.register
class TorchBackend(Backend):
    name = "torch"
    about = "pure torch, any device and dtype"
    preference = 10
    gpu_by_itself = False  # Python loops that wait for the device

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        scale: float,
        summary: SummaryKeys | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch, heads, rows, _ = q.shape
        shares = heads // max(1, k.shape[1])
        out = torch.zeros(batch, heads, rows, v.shape[-1], dtype=out_dtype or q.dtype, device=q.device)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        keys = gather_rows(k, route.kv.order)  # group-major
        values = gather_rows(v, route.kv.order)
        lengths = route.kv.sizes
        members = torch.nn.functional.pad(lengths, (0, 1))
        members[..., -1] = k.shape[2] - lengths.sum(-1)
        query_ends = route.query.offsets.tolist()
        for b in range(batch):
            for h in range(heads):
                g = h // shares
                ends = query_ends[b][h]
                for a in range(route.query.groups):
                    index = route.query.order[b, h, ends[a] : ends[a + 1]]
                    if not len(index):
                        continue
                    # padding comes after the last group and is never kept
                    kept = torch.nn.functional.pad(route.cells[b, h, a], (0, 1))
                    columns = kept.repeat_interleave(members[b, g], output_size=k.shape[2]).nonzero()[:, 0]
                    found = _attend_group(
                        q[b, h, index],
                        keys[b, g, columns],
                        values[b, g, columns],
                        scale,
                        _summary_of(summary, b, h, a, g),
                    )
                    out[b, h, index], lse[b, h, index] = found[0].to(out.dtype), found[1]
        return out, lse


@dataclass(frozen=True)
class _GroupSummary:
    """The summary keys of one query group."""

    keys: Tensor  # [T, D]
    values: Tensor  # [T, Dv]
    log_weight: Tensor  # [T]
    basis: Tensor | None = None  # [D, R]; this and the rest are the parts of a Drift
    origin: Tensor | None = None
    curve: Tensor | None = None
    slope: Tensor | None = None

    def drift(self, q: Tensor) -> tuple[Tensor, Tensor] | None:
        """What is added to log-weights and values at rows q [n, D].  # [n], [n, Dv]"""
        if self.basis is None or self.origin is None or self.curve is None or self.slope is None:
            return None
        y = q @ self.basis.to(q) - self.origin.to(q)
        return (y * self.curve.to(q) * y).sum(-1).clamp(max=MAX_BEND), y @ self.slope.to(q)


def _summary_of(summary: SummaryKeys | None, b: int, h: int, a: int, g: int) -> _GroupSummary | None:
    """The summary of one group without keys that are switched off; None if none is left."""
    if summary is None:
        return None
    on = summary.log_weight[b, h, a] != -torch.inf  # NaN counts as on: it must reach the output
    if not on.any():
        return None
    own = (summary.keys[b, h, a][on], summary.values[b, h, a][on], summary.log_weight[b, h, a][on])
    if summary.drift is None:
        return _GroupSummary(*own)
    drift = summary.drift
    return _GroupSummary(*own, drift.basis[b, g], drift.origin[b, h, a], drift.curve[b, h, a], drift.slope[b, h, a])


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, scale: float, summary: _GroupSummary | None
) -> tuple[Tensor, Tensor]:
    """Attention of rows [n, D] over keys [m, D] and their summary keys -> out [n, Dv], lse [n], both fp32
    (fp64 for fp64 rows)."""
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = q.to(working), k.to(working), v.to(working)
    own = len(k)
    bias = q.new_zeros(own)
    if summary is not None:
        k, v = torch.cat([k, summary.keys.to(working)]), torch.cat([v, summary.values.to(working)])
        bias = torch.cat([bias, summary.log_weight.to(working)])
    if not len(k):
        return q.new_zeros(len(q), v.shape[-1]), q.new_full((len(q),), -torch.inf, dtype=torch.float32)
    out, lse = q.new_empty(len(q), v.shape[-1]), q.new_empty(len(q))
    step = chunk_rows(4 * len(k), len(q))
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        logits = torch.addmm(bias, q[part] * scale, k.mT)  # [step, m]
        moved = None if summary is None else summary.drift(q[part])
        if moved is not None:
            logits[:, own:] += moved[0][:, None]
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        torch.mm(weights, v, out=out[part])
        if moved is not None:
            out[part] += weights[:, own:].sum(-1, keepdim=True) * moved[1]
        out[part] /= total
        lse[part] = (top + total.log())[:, 0]
    return out, lse.float()

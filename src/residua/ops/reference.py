"""Masked dense attention, one head at a time, as simple as possible. Small calls only: it builds an [Nq, Nk]
mask. On fp64 tensors its results are the reference for all other backends."""

import torch
from torch import Tensor

from ..types import MAX_BEND, Drift, Route, SummaryKeys
from .backend import BACKENDS, Backend


@BACKENDS.register
class Reference(Backend):
    name = "reference"
    about = "naive masked dense attention, what the others are measured by; never chosen by itself"
    preference = -1

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
        heads_per_kv = heads // max(1, k.shape[1])
        working = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(batch, heads, rows, v.shape[-1], dtype=out_dtype or q.dtype, device=q.device)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        for b in range(batch):
            for h in range(heads):
                query, keys, values = (
                    t.to(working) for t in (q[b, h], k[b, h // heads_per_kv], v[b, h // heads_per_kv])
                )
                labels = route.query.labels[b, h]  # [Nq]
                kept = _row_mask(labels, route.kv.labels[b, h // heads_per_kv], route.cells[b, h])
                logits = torch.where(kept, query @ keys.mT * scale, -torch.inf)  # [Nq, Nk]
                seen = kept.any(1, keepdim=True)  # [Nq, 1]
                if summary is not None:
                    on = (summary.log_weight[b, h] != -torch.inf).any(-1, keepdim=True)  # [Cq, 1]
                    seen = seen | (on[labels.clamp(min=0)] & (labels >= 0)[:, None])
                    more, own = _summary_columns(summary, query, labels, scale, b, h)
                    logits = torch.cat([logits, more], 1)
                    values = torch.cat([torch.where(kept[..., None], values, 0.0), own], 1)  # [Nq, Nk + T, Dv]
                if not logits.shape[1]:
                    continue
                top = logits.amax(-1, keepdim=True)
                weights = (logits - torch.where(top == -torch.inf, 0.0, top)).exp()
                total = weights.sum(-1, keepdim=True)
                if summary is None:
                    rows_out = _sum_kept(weights, values, kept, labels)
                else:
                    rows_out = torch.einsum("nk,nkd->nd", weights, values)
                # a row that sees keys but gives them no weight is NaN, as in dense attention
                out[b, h] = torch.where(seen, rows_out / total, 0.0).to(out.dtype)
                lse[b, h] = torch.where(seen, top + total.log(), -torch.inf)[:, 0].float()
        return out, lse


def _row_mask(query_labels: Tensor, kv_labels: Tensor, cells: Tensor) -> Tensor:
    """Which keys each row sees.  # [Nq, Nk] bool"""
    if not cells.shape[1]:
        return torch.zeros(len(query_labels), len(kv_labels), dtype=torch.bool, device=cells.device)
    mask = cells[query_labels.clamp(min=0)][:, kv_labels.clamp(min=0)]
    return mask & (query_labels >= 0)[:, None] & (kv_labels >= 0)


def _sum_kept(weights: Tensor, values: Tensor, kept: Tensor, labels: Tensor) -> Tensor:
    """Weighted sums of the values, group by group: values that a row does not keep must not reach it as 0 * NaN."""
    sums = weights.new_zeros(len(labels), values.shape[-1])
    for group in labels.unique():
        rows = labels == group
        sums[rows] = weights[rows] @ torch.where(kept[rows][0][:, None], values, 0.0)
    return sums


def _summary_columns(
    summary: SummaryKeys, query: Tensor, labels: Tensor, scale: float, b: int, h: int
) -> tuple[Tensor, Tensor]:
    """Logits and values of each row's summary keys.  # [Nq, T], [Nq, T, Dv]"""
    group = labels.clamp(min=0)
    keys = summary.keys[b, h].to(query.dtype)[group]  # [Nq, T, D]
    more = torch.einsum("nd,ntd->nt", query * scale, keys) + summary.log_weight[b, h].to(query.dtype)[group]
    own = summary.values[b, h].to(query.dtype)[group]  # [Nq, T, Dv]
    if summary.drift is not None:
        bend, shift = _drift(summary.drift, query, group, b, h)
        more, own = more + bend[:, None], own + shift[:, None, :]
    more = torch.where((labels >= 0)[:, None], more, -torch.inf)
    return more, torch.where((more != -torch.inf)[..., None], own, 0.0)


def _drift(drift: Drift, query: Tensor, group: Tensor, b: int, h: int) -> tuple[Tensor, Tensor]:
    """What is added to log-weights and values of the summary keys at every row.  # [Nq], [Nq, Dv]"""
    heads_per_kv = drift.origin.shape[1] // drift.basis.shape[1]
    origin, curve, slope = (t[b, h].to(query.dtype)[group] for t in (drift.origin, drift.curve, drift.slope))
    y = query @ drift.basis[b, h // heads_per_kv].to(query.dtype) - origin  # [Nq, R]
    return (y * curve * y).sum(-1).clamp(max=MAX_BEND), torch.einsum("nr,nrd->nd", y, slope)

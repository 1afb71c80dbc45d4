"""Pure torch on any device: one query group at a time against its gathered keys, never [N, N]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import ExtraKeys, Route
from .backend import Backend, register
from .torch_primitives import CHUNK_BYTES, gather_rows


@register
class Portable(Backend):
    name = "portable"
    summary = "pure torch, any device and dtype"
    priority = 10

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        scale: float,
        extra: ExtraKeys | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch, heads, rows, _ = q.shape
        shares = heads // max(1, k.shape[1])
        out = torch.zeros(batch, heads, rows, v.shape[-1], dtype=out_dtype or q.dtype, device=q.device)
        lse = torch.full((batch, heads, rows), -torch.inf, device=q.device)
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
                    # padding stands behind the last group, with a False of its own
                    kept = torch.nn.functional.pad(route.cells[b, h, a], (0, 1))
                    columns = kept.repeat_interleave(members[b, g], output_size=k.shape[2]).nonzero()[:, 0]
                    found = _attend_group(
                        q[b, h, index],
                        keys[b, g, columns],
                        values[b, g, columns],
                        scale,
                        _extra_of(extra, b, h, a),
                    )
                    out[b, h, index], lse[b, h, index] = found[0].to(out.dtype), found[1]
        return out, lse


def _extra_of(extra: ExtraKeys | None, b: int, h: int, a: int) -> tuple[Tensor, Tensor, Tensor] | None:
    if extra is None:
        return None
    return extra.keys[b, h, a], extra.values[b, h, a], extra.log_weight[b, h, a]


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, scale: float, extra: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Attention of rows [n, D] over keys [m, D] and their extra keys -> out [n, Dv], lse [n], both fp32
    (fp64 for fp64 rows)."""
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = q.to(working) * scale, k.to(working), v.to(working)
    bias = q.new_zeros(len(k))
    if extra is not None:
        on = extra[2] > -torch.inf
        k = torch.cat([k, extra[0][on].to(working)])
        v = torch.cat([v, extra[1][on].to(working)])
        bias = torch.cat([bias, extra[2][on].to(working)])
    if not len(k):
        return q.new_zeros(len(q), v.shape[-1]), q.new_full((len(q),), -torch.inf, dtype=torch.float32)
    out, lse = q.new_empty(len(q), v.shape[-1]), q.new_empty(len(q))
    step = max(1, CHUNK_BYTES // (4 * len(k)))
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        logits = torch.addmm(bias, q[part], k.mT)  # [step, m]
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        torch.mm(weights, v, out=out[part])
        out[part] /= total
        lse[part] = (top + total.log())[:, 0]
    return out, lse.float()

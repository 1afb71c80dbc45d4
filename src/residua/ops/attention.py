"""Attention over what is kept, and of single rows over everything."""

import torch
from torch import Tensor

from ..types import MAX_BEND, Drift, Partition, Route, SummaryKeys
from .grouping import GroupingPrimitives, take_rows
from .matrices import chunk_rows


class AttentionPrimitives(GroupingPrimitives):
    """Attention over what is kept, and of single rows over everything."""

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
        """Softmax attention of every row over the kept cells of its query group, and over its summary keys,
        which may drift (see `types.Drift`).

        Args:
            q: [B, H, Nq, D].
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            route: The kept cells.
            scale: Factor of the scores.
            summary: What stands for the skipped groups; None: nothing.
            out_dtype: Of the output; None: q's.

        Returns:
            The output [B, H, Nq, Dv] in the original row order, and the natural log-sum-exp [B, H, Nq] fp32.
            A row of no group or with nothing kept gets 0 and -inf.
        """
        batch, heads, rows, _ = q.shape
        heads_per_kv = heads // max(1, k.shape[1])
        out = torch.zeros(batch, heads, rows, v.shape[-1], dtype=out_dtype or q.dtype, device=q.device)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        keys = take_rows(k, route.kv.order)  # group-major
        values = take_rows(v, route.kv.order)
        lengths = route.kv.sizes
        members = torch.nn.functional.pad(lengths, (0, 1))
        members[..., -1] = k.shape[2] - lengths.sum(-1)
        query_ends = route.query.offsets.tolist()
        for b in range(batch):
            for h in range(heads):
                g = h // heads_per_kv
                ends = query_ends[b][h]
                for a in range(route.query.groups):
                    index = route.query.order[b, h, ends[a] : ends[a + 1]]
                    if not len(index):
                        continue
                    # padding comes after the last group and is never kept
                    kept = torch.nn.functional.pad(route.cells[b, h, a], (0, 1))
                    columns = kept.repeat_interleave(members[b, g], output_size=k.shape[2]).nonzero()[:, 0]
                    own = _summary_of(summary, b, h, a, g)
                    found = _attend_group(q[b, h, index], keys[b, g, columns], values[b, g, columns], scale, own)
                    out[b, h, index], lse[b, h, index] = found[0].to(out.dtype), found[1]
        return out, lse

    def attend_rows(self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
        """Exact attention of some query rows over all keys that are not padding.

        Args:
            rows: [B, H, M, D].
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            key_mask: [B, Nk] bool, False at padding; None: no padding.
            scale: Factor of the scores.

        Returns:
            [B, H, M, Dv] fp32.
        """
        batch, heads, count, _ = rows.shape
        kv_heads, tokens = k.shape[1], k.shape[2]
        working = torch.float64 if rows.dtype == torch.float64 else torch.float32
        shared = rows.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)  # [B, Hkv, heads_per_kv * M, D]
        out = rows.new_zeros(*shared.shape[:3], v.shape[-1], dtype=working)
        step = chunk_rows(8 * tokens, shared.shape[2])
        for b in range(batch):
            hidden = None if key_mask is None else ~key_mask[b]
            for g in range(kv_heads):
                keys, values = k[b, g].to(working), v[b, g].to(working)
                if hidden is not None:
                    values = torch.where(hidden[:, None], 0.0, values)  # 0 * NaN must not reach the output
                for start in range(0, shared.shape[2], step):
                    logits = shared[b, g, start : start + step].to(working) @ keys.mT * scale  # [step, Nk]
                    if hidden is not None:
                        logits.masked_fill_(hidden, -torch.inf)
                    weights = logits.softmax(-1)
                    if hidden is not None:  # without any key: zeros, not NaN; -inf from a key that is seen stays NaN
                        weights = torch.where(hidden.all(), 0.0, weights)
                    out[b, g, start : start + step] = weights @ values
        return out.reshape(batch, heads, count, v.shape[-1])

    def split_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`attend_rows`, and with it what the rows would see if they kept only some K/V groups.

        Args:
            rows: [B, H, M, D].
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            kv: Groups of the keys.
            kept: [B, H, M, Ck] bool, the groups that each row keeps.
            key_mask: As in `attend_rows`.
            scale: Factor of the scores.

        Returns:
            The exact output [B, H, M, Dv], that over the kept keys alone [B, H, M, Dv], and the natural
            log-sum-exp of the latter [B, H, M], all fp32; 0 and -inf for a row that keeps nothing.
        """
        batch, heads, count, _ = rows.shape
        heads_per_kv, tokens = heads // k.shape[1], k.shape[2]
        exact = self.attend_rows(rows, k, v, key_mask, scale)
        part = torch.zeros_like(exact)
        lse = exact.new_empty(batch, heads, count)
        groups = torch.nn.functional.pad(kept, (0, 1))  # label -1, padding, is the last: never kept
        step = chunk_rows(8 * tokens, count)
        for b in range(batch):
            for h in range(heads):
                keys, values = k[b, h // heads_per_kv].to(exact.dtype), v[b, h // heads_per_kv].to(exact.dtype)
                for start in range(0, count, step):
                    at = slice(start, start + step)
                    seen = groups[b, h, at][:, kv.labels[b, h // heads_per_kv]]  # [step, Nk]
                    logits = rows[b, h, at].to(exact.dtype) @ keys.mT * scale
                    logits.masked_fill_(~seen, -torch.inf)
                    # what no row keeps must not reach it as 0 * NaN
                    weights = torch.where(seen.any(-1, keepdim=True), logits.softmax(-1), 0.0)
                    part[b, h, at] = weights @ torch.where(seen.any(0)[:, None], values, 0.0)
                    lse[b, h, at] = logits.logsumexp(-1)
        return exact, part, lse


def _summary_of(summary: SummaryKeys | None, b: int, h: int, a: int, g: int) -> SummaryKeys | None:
    """The summary of one group, keys [T, D] and so on, without keys that are switched off; None if none is left."""
    if summary is None:
        return None
    on = summary.log_weight[b, h, a] != -torch.inf  # NaN counts as on: it must reach the output
    if not on.any():
        return None
    drift = summary.drift
    if drift is not None:
        drift = Drift(drift.basis[b, g], drift.origin[b, h, a], drift.curve[b, h, a], drift.slope[b, h, a])
    return SummaryKeys(summary.keys[b, h, a][on], summary.values[b, h, a][on], summary.log_weight[b, h, a][on], drift)


def _drifted(q: Tensor, drift: Drift) -> tuple[Tensor, Tensor]:
    """What is added to log-weights and values of one group's summary keys at its rows q [n, D].  # [n], [n, Dv]"""
    y = q @ drift.basis.to(q) - drift.origin.to(q)
    return (y * drift.curve.to(q) * y).sum(-1).clamp(max=MAX_BEND), y @ drift.slope.to(q)


def _attend_group(q: Tensor, k: Tensor, v: Tensor, scale: float, summary: SummaryKeys | None) -> tuple[Tensor, Tensor]:
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
        moved = None if summary is None or summary.drift is None else _drifted(q[part], summary.drift)
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

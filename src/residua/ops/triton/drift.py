"""Where every query row lies relative to its group's anchor, and how far its extra keys' log-weights bend.

A pass of its own where the attention kernel has no registers left to find both itself.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import MAX_BEND, Drift, Partition
from .shapes import cdiv, padded


@triton.jit
def drift_kernel(
    Q,  # [B, H, NQ, D] strided
    BASIS,  # [B, Hkv, D, R] fp32
    ORIGIN,  # [B, H, CQ, R] fp32
    CURVE,  # [B, H, CQ, R] fp32
    LABELS,  # [B, H, NQ] int64
    Y,  # [B, H, NQ, R] fp32
    BEND,  # [B, H, NQ] fp32
    H,
    shares,
    NQ,
    CQ,
    R,
    sb,
    sh,
    sn,
    sd,
    tiles,
    most,
    D: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = (pid % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    ranks = tl.arange(0, BR)
    live = rows < NQ
    Q += head // H * sb + head % H * sh
    BASIS += (head // H * (H // shares) + head % H // shares) * D * R
    y = tl.zeros([BN, BR], tl.float32)
    for start in range(0, D, BK):
        dims = start + tl.arange(0, BK)
        q_mask = live[:, None] & (dims < D)[None, :]
        q = tl.load(Q + rows[:, None] * sn + dims[None, :] * sd, mask=q_mask, other=0.0)
        mask = (dims < D)[:, None] & (ranks < R)[None, :]
        basis = tl.load(BASIS + dims[:, None] * R + ranks[None, :], mask=mask, other=0.0)
        y = tl.dot(q.to(tl.float32), basis, y, input_precision="tf32x3")
    label = tl.load(LABELS + head * NQ + rows, mask=live, other=-1)
    own = (label >= 0)[:, None] & (ranks < R)[None, :]
    at = (head * CQ + label)[:, None] * R + ranks[None, :]
    y -= tl.load(ORIGIN + at, mask=own, other=0.0)
    bend = tl.sum(y * y * tl.load(CURVE + at, mask=own, other=0.0), 1)
    tl.store(BEND + head * NQ + rows, tl.where(bend > most, most, bend), mask=live)  # NaN stays
    tl.store(Y + (head * NQ + rows)[:, None] * R + ranks[None, :], y, mask=live[:, None] & (ranks < R)[None, :])


def drift_rows(q: Tensor, drift: Drift, query: Partition) -> tuple[Tensor, Tensor]:
    """-> y = q @ basis - origin [B, H, Nq, R], min(sum(y^2 * curve), MAX_BEND) [B, H, Nq], both fp32; what
    rows of no group get is read by nobody."""
    batch, heads, count, dim = q.shape
    kv_heads, rank = drift.basis.shape[1], drift.basis.shape[-1]
    y = torch.empty(batch, heads, count, rank, dtype=torch.float32, device=q.device)
    bend = torch.empty(batch, heads, count, dtype=torch.float32, device=q.device)
    rows = 64
    tiles = cdiv(count, rows)
    drift_kernel[(batch * heads * tiles,)](
        q,
        *(t.float().contiguous() for t in (drift.basis, drift.origin, drift.curve)),
        query.labels.contiguous(),
        y,
        bend,
        heads,
        heads // kv_heads,
        count,
        query.groups,
        rank,
        *q.stride(),
        tiles,
        MAX_BEND,
        D=dim,
        BN=rows,
        BK=32,
        BR=padded(rank),
        num_warps=4,
        num_stages=2,
    )
    return y, bend

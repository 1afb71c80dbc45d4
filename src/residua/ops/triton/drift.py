"""Where every query row lies relative to its group's anchor, and how far the log-weights of its summary keys bend.

A pass of its own where the attention kernel has no registers left to find both itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import MAX_BEND, Drift, Partition
from .device_functions import head_start, kv_head_of, load_matrix, load_rows, row_block
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
    heads_per_kv,
    NQ,
    CQ,
    R,
    strides,
    tiles,
    max_bend,
    D: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """One program: BN query rows of a head. Y = q @ basis - origin and BEND = min(sum(Y^2 curve), max_bend), with
    the origin and the curve of each row's query group."""
    head, rows = row_block(tiles, BN)
    ranks = tl.arange(0, BR)
    live = rows < NQ
    Q = head_start(Q, strides, head, H)
    BASIS += kv_head_of(head, H, heads_per_kv) * D * R
    # y = q @ basis, BK channels at a time
    y = tl.zeros([BN, BR], tl.float32)
    for start in range(0, D, BK):
        dims = start + tl.arange(0, BK)
        q = load_rows(Q, strides, rows, dims, live, D)
        basis = load_matrix(BASIS, dims, ranks, D, R)
        y = tl.dot(q.to(tl.float32), basis, y, input_precision="tf32x3")
    # origin and curve of the row's query group
    label = tl.load(LABELS + head * NQ + rows, mask=live, other=-1)
    own = (label >= 0)[:, None] & (ranks < R)[None, :]
    at = (head * CQ + label)[:, None] * R + ranks[None, :]
    y -= tl.load(ORIGIN + at, mask=own, other=0.0)
    bend = tl.sum(y * y * tl.load(CURVE + at, mask=own, other=0.0), 1)
    tl.store(BEND + head * NQ + rows, tl.where(bend > max_bend, max_bend, bend), mask=live)  # NaN stays
    tl.store(Y + (head * NQ + rows)[:, None] * R + ranks[None, :], y, mask=live[:, None] & (ranks < R)[None, :])


def drift_rows(q: Tensor, drift: Drift, query: Partition) -> tuple[Tensor, Tensor]:
    """-> y = q @ basis - origin [B, H, Nq, R], min(sum(y^2 * curve), MAX_BEND) [B, H, Nq], both fp32. What
    rows of no group get is not read."""
    batch, heads, count, dim = q.shape
    kv_heads, rank = drift.basis.shape[1], drift.basis.shape[-1]
    y = torch.empty(batch, heads, count, rank, dtype=torch.float32, device=q.device)
    bend = torch.empty(batch, heads, count, dtype=torch.float32, device=q.device)
    rows = 64
    tiles = cdiv(count, rows)
    parts = (t.float().contiguous() for t in (drift.basis, drift.origin, drift.curve))
    sizes = (heads, heads // kv_heads, count, query.groups, rank, q.stride(), tiles, MAX_BEND)
    blocks = {"D": dim, "BN": rows, "BK": 32, "BR": padded(rank)}
    drift_kernel[(batch * heads * tiles,)](
        q, *parts, query.labels.contiguous(), y, bend, *sizes, **blocks, num_warps=4, num_stages=2
    )
    return y, bend

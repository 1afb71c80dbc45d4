"""How far an attention output is from dense attention: the relative error of its rows."""

import torch
from torch import Tensor


def relative_row_error(out: Tensor, dense: Tensor) -> Tensor:
    """|out - dense| / |dense| for every row.  # [..., N, Dv] -> [..., N] fp32"""
    dense = dense.float()
    tiny = torch.finfo(torch.float32).tiny
    return (out.float() - dense).norm(dim=-1) / dense.norm(dim=-1).clamp(min=tiny)


def row_errors(out: Tensor, dense: Tensor, leave_out: Tensor | None = None) -> tuple[float, float]:
    """Mean and 99th percentile of the relative row error, without the rows `leave_out` [B, H, M]."""
    errors = relative_row_error(out, dense)  # [B, H, N]
    if leave_out is not None:
        kept = torch.ones_like(errors, dtype=torch.bool).scatter_(-1, leave_out, False)
        errors = errors[kept]
    errors = errors.flatten()
    rank = max(1, -(-99 * errors.numel() // 100))  # torch.quantile refuses more than 16 million values
    return float(errors.mean()), float(errors.kthvalue(rank).values)

"""The judge's arithmetic in three launches: errors of the probe rows, the choice of every head, and what it
switches off. Each would be dozens of small operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import MAX_BEND, Choice, Drift, SummaryKeys
from .device_functions import kv_head_of, load_matrix
from .shapes import as_bytes, cdiv, padded

TINY = torch.finfo(torch.float32).tiny
WITH_DRIFT, WITHOUT_DRIFT = tl.constexpr(int(Choice.WITH_DRIFT)), tl.constexpr(int(Choice.WITHOUT_DRIFT))


@triton.jit
def _distance(x, exact, norm):
    """Distance of a row from the exact one, relative to its norm."""
    return tl.sqrt(tl.sum((x - exact) * (x - exact), 0)) / norm


@triton.jit
def _joined(sparse, lse, value, top):
    """A row over the union of two sets of keys."""
    share = 1.0 / (1.0 + tl.exp(lse - top))
    return tl.where(top == -float("inf"), sparse, sparse + share * (value - sparse))


@triton.jit
def candidates_kernel(
    ROWS,  # [B, H, M, D] contiguous
    GROUP,  # [B, H, M] int64, not negative
    EXACT,  # [B, H, M, DV] fp32
    SPARSE,  # [B, H, M, DV] fp32, over the kept keys
    LSE,  # [B, H, M] fp32
    VALUE,  # [B, H, M, DV] fp32, over the summary keys
    TOP,  # [B, H, M] fp32
    BASIS,  # [B, Hkv, D, R] fp32, or None: without a drift, which this and the next three are
    ORIGIN,  # [B, H, CQ, R] fp32
    CURVE,  # [B, H, CQ, R] fp32
    SLOPE,  # [B, H, CQ, R, DV]
    ERRORS,  # [candidates, B, H, M] fp32
    H,
    heads_per_kv,
    M,
    CQ,
    R,
    max_bend,
    tiny,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BR: tl.constexpr,
    DRIFT: tl.constexpr,
):
    """One program: one probe row. ERRORS = its distance from the exact row, relative to the norm of that, for each
    candidate: the summary with its drift, without it, and no summary."""
    row = tl.program_id(0).to(tl.int64)
    head = row // M
    cols = tl.arange(0, BDV)
    exact = tl.load(EXACT + row * DV + cols, mask=cols < DV, other=0.0)
    sparse = tl.load(SPARSE + row * DV + cols, mask=cols < DV, other=0.0)
    value = tl.load(VALUE + row * DV + cols, mask=cols < DV, other=0.0)
    lse = tl.load(LSE + row)
    top = tl.load(TOP + row)
    norm = tl.sqrt(tl.sum(exact * exact, 0))
    norm = tl.where(norm < tiny, tiny, norm)  # NaN stays
    step = tl.num_programs(0).to(tl.int64)
    if DRIFT:
        dims = tl.arange(0, BD)
        ranks = tl.arange(0, BR)
        own = ranks < R
        BASIS += kv_head_of(head, H, heads_per_kv) * D * R
        at = head * CQ + tl.load(GROUP + row)
        q = tl.load(ROWS + row * D + dims, mask=dims < D, other=0.0).to(tl.float32)
        # where the row lies relative to its anchor, and what that changes
        basis = load_matrix(BASIS, dims, ranks, D, R)
        y = tl.sum(q[:, None] * basis, 0) - tl.load(ORIGIN + at * R + ranks, mask=own, other=0.0)
        bend = tl.sum(y * tl.load(CURVE + at * R + ranks, mask=own, other=0.0) * y, 0)
        bend = tl.where(bend > max_bend, max_bend, bend)  # NaN stays
        side = own[:, None] & (cols < DV)[None, :]
        slope = tl.load(SLOPE + (at * R + ranks[:, None]) * DV + cols[None, :], mask=side, other=0.0)
        shift = tl.sum(y[:, None] * slope.to(tl.float32), 0)
        drifted = _joined(sparse, lse, value + shift, top + bend)
        tl.store(ERRORS + row, _distance(drifted, exact, norm))
        ERRORS += step
    tl.store(ERRORS + row, _distance(_joined(sparse, lse, value, top), exact, norm))
    tl.store(ERRORS + step + row, _distance(sparse, exact, norm))


@triton.jit
def _mean(ERRORS, WEIGHTS, M, tiny, BM: tl.constexpr):
    """Mean of the errors of a head's rows by their weights."""
    total = tl.zeros([BM], tl.float32)
    weight = tl.zeros([BM], tl.float32)
    for first in range(0, M, BM):
        rows = first + tl.arange(0, BM)
        own = tl.load(WEIGHTS + rows, mask=rows < M, other=0.0)
        total += own * tl.load(ERRORS + rows, mask=rows < M, other=0.0)
        weight += own
    return tl.sum(total, 0) / tl.maximum(tl.sum(weight, 0), tiny)


@triton.jit
def choice_kernel(
    ERRORS, WEIGHTS, WITHOUT_SUMMARY, CHOICE, ERROR, M, handicap, tiny, N: tl.constexpr, BM: tl.constexpr
):
    """One program: one head. ERRORS [N, B, H, M] and WEIGHTS [B, H, M] fp32, WITHOUT_SUMMARY [B, H] uint8 -> CHOICE [B,
    H] int64 = the candidate of the smallest mean ERROR [B, H]; a later one, which is simpler, must be better by the
    handicap. A head without a summary has the last one."""
    head = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * M
    ERRORS += head * M
    WEIGHTS += head * M
    error = _mean(ERRORS, WEIGHTS, M, tiny, BM)
    choice = tl.zeros([], tl.int64)
    last = error
    for number in tl.static_range(1, N):
        last = _mean(ERRORS + number * step, WEIGHTS, M, tiny, BM)
        better = last < handicap * error
        choice = tl.where(better, number, choice)
        error = tl.where(better, last, error)
    without_summary = tl.load(WITHOUT_SUMMARY + head) != 0
    tl.store(CHOICE + head, tl.where(without_summary, N - 1, choice).to(tl.int64))
    tl.store(ERROR + head, tl.where(without_summary, last, error))


@triton.jit
def switch_kernel(
    CHOICE, WEIGHT, CURVE, SLOPE, weights, curves, slopes, blocks, DRIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one of `blocks` parts of a head. Switches off what its candidate does without: the drift by zeros in
    CURVE and SLOPE, the summary by log-weights of -inf in WEIGHT. A head has `weights`, `curves`, `slopes`
    numbers of them."""
    pid = tl.program_id(0)
    head = (pid // blocks).to(tl.int64)
    choice = tl.load(CHOICE + head)
    step = blocks * BLOCK
    place = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    if choice > WITHOUT_DRIFT:
        for first in range(0, weights, step):
            at = first + place
            tl.store(WEIGHT + head * weights + at, -float("inf"), mask=at < weights)
    if DRIFT and choice > WITH_DRIFT:
        for first in range(0, curves, step):
            at = first + place
            tl.store(CURVE + head * curves + at, 0.0, mask=at < curves)
        for first in range(0, slopes, step):
            at = first + place
            tl.store(SLOPE + head * slopes + at, 0.0, mask=at < slopes)


def candidate_errors(
    rows: Tensor,
    group: Tensor,
    exact: Tensor,
    kept: tuple[Tensor, Tensor],
    skipped: tuple[Tensor, Tensor],
    drift: Drift | None,
) -> Tensor:
    """-> [candidates, B, H, M] fp32"""
    batch, heads, count, dim = rows.shape
    value_dim = exact.shape[-1]
    errors = torch.empty(2 if drift is None else 3, batch, heads, count, dtype=torch.float32, device=rows.device)
    if not errors.numel():
        return errors
    moving: tuple[Tensor | None, ...] = (None,) * 4
    drift_sizes = (1, count, 0, 0)
    if drift is not None:
        moving = (*(t.float().contiguous() for t in (drift.basis, drift.origin, drift.curve)), drift.slope.contiguous())
        drift_sizes = (heads // drift.basis.shape[1], count, drift.origin.shape[2], drift.basis.shape[-1])
    tensors = (t.contiguous() for t in (rows, group, exact, *kept, *skipped))
    blocks = {"D": dim, "DV": value_dim, "BD": padded(dim), "BDV": padded(value_dim)}
    blocks["BR"] = padded(drift_sizes[-1]) if drift is not None else 1
    candidates_kernel[(batch * heads * count,)](
        *tensors, *moving, errors, heads, *drift_sizes, MAX_BEND, TINY, **blocks, DRIFT=drift is not None
    )
    return errors


def best_candidate(errors: Tensor, weights: Tensor, without_summary: Tensor, handicap: float) -> tuple[Tensor, Tensor]:
    """-> choice [B, H] int64, error [B, H] fp32"""
    count = errors.shape[-1]
    choice = torch.empty(without_summary.shape, dtype=torch.int64, device=without_summary.device)
    error = torch.empty(without_summary.shape, dtype=torch.float32, device=without_summary.device)
    if choice.numel():
        tensors = (errors.contiguous(), weights.contiguous(), as_bytes(without_summary), choice, error)
        blocks = {"N": len(errors), "BM": min(128, padded(count))}
        choice_kernel[(choice.numel(),)](*tensors, count, handicap, TINY, **blocks, num_warps=1)
    return choice, error


def switch_summary(summary: SummaryKeys, choice: Tensor) -> SummaryKeys | None:
    """In place, and without reading what stays on; None if log-weights, curve or slope are not contiguous."""
    drift, heads = summary.drift, choice.numel()
    weights = summary.log_weight.numel() // max(1, heads)
    moving = () if drift is None else (drift.curve, drift.slope)
    if not all(x.is_contiguous() for x in (summary.log_weight, *moving)):
        return None
    if not summary.log_weight.numel():
        return summary
    blocks = min(64, cdiv(max(t.numel() for t in (summary.log_weight, *moving)), heads * 1024))
    sizes = (weights, *(t.numel() // heads for t in moving)) if moving else (weights, 0, 0)
    tensors = (choice.contiguous(), summary.log_weight, *(moving or (None, None)))
    switch_kernel[(heads * blocks,)](*tensors, *sizes, blocks, DRIFT=drift is not None, BLOCK=1024)
    return summary

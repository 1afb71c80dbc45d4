"""Tokens sorted by label, stably, for all heads at once: a counting sort, since labels are small numbers.

Every program counts the labels of a stretch of tokens; sums over the stretches and over the labels give each
program its places; then it puts its tokens there, a block at a time. Only integers are added, so the order in
which programs run changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import cdiv, padded

STRETCH, BLOCK = 1024, 64  # tokens of a program, and of one comparison of all with all


@triton.jit
def count_kernel(LABELS, COUNTS, N, groups, stretches, bins, STRETCH: tl.constexpr, BINS: tl.constexpr):
    """One program: one stretch of tokens of a head. COUNTS [G, stretches, bins] int32 = how many of its LABELS [G, N],
    any integers, have each value."""
    pid = tl.program_id(0)
    head = (pid // stretches).to(tl.int64)
    at = pid % stretches * STRETCH + tl.arange(0, STRETCH)
    label = tl.load(LABELS + head * N + at, mask=at < N, other=-2).to(tl.int32)
    label = tl.where(label == -1, groups, label)  # tokens of no group come last
    counts = tl.histogram(label, BINS, mask=label >= 0)
    places = tl.arange(0, BINS)
    tl.store(COUNTS + pid.to(tl.int64) * bins + places, counts, mask=places < bins)


@triton.jit
def starts_kernel(COUNTS, BEFORE, OFFSETS, stretches, bins, BINS: tl.constexpr):
    """One program: one head. BEFORE = running sums of COUNTS, both [G, stretches, bins] int32, over its stretches up to
    the end of each; OFFSETS [G, bins] int64 = running sums of the totals over its labels: the first place of each."""
    head = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BINS)
    here = places < bins
    total = tl.zeros([BINS], tl.int32)
    for stretch in range(0, stretches):
        at = (head * stretches + stretch) * bins + places
        total += tl.load(COUNTS + at, mask=here, other=0)
        tl.store(BEFORE + at, total, mask=here)
    tl.store(OFFSETS + head * bins + places, (tl.cumsum(total, 0) - total).to(tl.int64), mask=here)


@triton.jit
def place_kernel(
    LABELS, BEFORE, STARTS, COUNTS, ORDER, N, groups, stretches, bins, STRETCH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one stretch of tokens of a head. Puts them into ORDER [G, N], BLOCK tokens at a time. BEFORE and
    STARTS are those of `starts_kernel`, COUNTS that of `count_kernel`, which is overwritten."""
    pid = tl.program_id(0)
    head = (pid // stretches).to(tl.int64)
    BEFORE += pid.to(tl.int64) * bins
    COUNTS += pid.to(tl.int64) * bins
    ids = tl.arange(0, BLOCK)
    start = pid % stretches * STRETCH
    for first in range(start, tl.minimum(start + STRETCH, N), BLOCK):
        at = first + ids
        label = tl.load(LABELS + head * N + at, mask=at < N, other=-2).to(tl.int32)
        label = tl.where(label == -1, groups, label)
        live = label >= 0
        # how many of the block's tokens with the same label come before this one, and after it
        same = (label[:, None] == label[None, :]) & live[None, :]
        rank = tl.sum((same & (ids[None, :] < ids[:, None])).to(tl.int32), 1)
        after = tl.sum((same & (ids[None, :] > ids[:, None])).to(tl.int32), 1)
        # COUNTS holds how many tokens of the stretch are still to come
        left = tl.load(COUNTS + label, mask=live, other=0)
        base = tl.load(BEFORE + label, mask=live, other=0) - left
        place = tl.load(STARTS + head * bins + label, mask=live, other=0)
        tl.store(ORDER + head * N + place + base + rank, at.to(ORDER.dtype.element_ty), mask=live)
        tl.debug_barrier()
        tl.store(COUNTS + label, left - rank - 1, mask=live & (after == 0))  # by the last of each label
        tl.debug_barrier()


def sort_labels(
    labels: Tensor, groups: int, stretch: int = STRETCH, dtype: torch.dtype = torch.long, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Stable order and offsets of labels [G, N] of any integer type in -1..groups-1. A program counts the labels of a
    `stretch` of tokens: many labels want long stretches. It compares the tokens of a `block` with each other: small
    blocks leave registers for more programs at a time.

    -> order [G, N] in `dtype` (label -1 last), offsets [G, groups + 1] int64
    """
    rows, count = labels.shape
    bins = groups + 1  # the last one takes the label -1
    offsets = torch.empty(rows, bins, dtype=torch.long, device=labels.device)
    order = torch.empty(rows, count, dtype=dtype, device=labels.device)
    if labels.numel() == 0:
        return order, offsets.zero_()
    labels = labels.contiguous()
    stretches = cdiv(count, stretch)
    counts = torch.empty(rows, stretches, bins, dtype=torch.int32, device=labels.device)
    before = torch.empty_like(counts)
    grid, room = (rows * stretches,), padded(bins)
    sizes = (groups, stretches, bins)
    count_kernel[grid](labels, counts, count, *sizes, STRETCH=stretch, BINS=room)
    starts_kernel[(rows,)](counts, before, offsets, stretches, bins, BINS=room)
    place_kernel[grid](labels, before, offsets, counts, order, count, *sizes, STRETCH=stretch, BLOCK=block)
    return order, offsets

"""Lloyd steps: distance and argmin fused, so that the [N, C] distances never exist.

Coordinates and centres are split into two parts of fp16 each; three products of the parts keep about as many
digits as fp32. Coordinates that come in fp16 are compared with centres that are rounded to fp16 as well, by
one product: rounding moves a centre by less than its rows are rounded, and the nearest of the rounded centres
is found exactly. What is not finite counts as 0, and no coordinate as more than fp16 can hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_functions import finite_fp16, row_block
from .segments import segment_means
from .shapes import Tiles, as_bytes, cdiv, padded
from .sort import sort_labels


@triton.jit
def centres_kernel(CENTRES, HIGH, LOW, HALF, C, room, tiles, R: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr):
    """One program: BC of the CENTRES [G, C, R] fp32 of a head, as `assign_kernel` reads them: HIGH [G, room, BR] fp16,
    what that leaves in LOW, which may be None, zeros behind column R and row C; HALF [G, room] fp32 their squared
    lengths by two, infinite behind row C."""
    pid = tl.program_id(0)
    group = (pid // tiles).to(tl.int64)
    ids = pid % tiles * BC + tl.arange(0, BC)
    dims = tl.arange(0, BR)
    mask = (ids < C)[:, None] & (dims < R)[None, :]
    c = finite_fp16(tl.load(CENTRES + (group * C + ids)[:, None] * R + dims[None, :], mask=mask, other=0.0))
    high = c.to(tl.float16)
    here = (ids < room)[:, None]
    at = (group * room + ids)[:, None] * BR + dims[None, :]
    tl.store(HIGH + at, high, mask=here)
    if LOW is not None:
        tl.store(LOW + at, (c - high.to(tl.float32)).to(tl.float16), mask=here)
    else:
        c = high.to(tl.float32)
    half = tl.where(ids < C, tl.sum(c * c, 1) * 0.5, float("inf"))
    tl.store(HALF + group * room + ids, half, mask=ids < room)


@triton.jit
def assign_kernel(
    X,  # [G, N, R] fp32 or fp16
    HIGH,  # [G, room, BR] fp16
    LOW,  # [G, room, BR] fp16, or None: rows and centres are one part
    HALF,  # [G, room] fp32
    VALID,  # [G, N] uint8, or None
    LABELS,  # [G, N] int64
    N,
    C,
    room,  # C, rounded up to whole tiles
    tiles,
    R: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    PARTS: tl.constexpr,  # whether rows and centres are two parts
):
    """One program: BN rows of a head. LABELS = the index of the nearest centre, -1 where not VALID."""
    group, rows = row_block(tiles, BN)
    dims = tl.arange(0, BR)
    ids = tl.arange(0, BC)
    mask = (rows < N)[:, None] & (dims < R)[None, :]
    x = tl.load(X + (group * N + rows)[:, None] * R + dims[None, :], mask=mask, other=0.0)
    x = finite_fp16(x.to(tl.float32))
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    best = tl.full([BN, BC], float("inf"), tl.float32)
    tile = tl.zeros([BN, BC], tl.int32)
    high_tile = HIGH + group * room * BR + ids[None, :] * BR + dims[:, None]
    if PARTS:
        low_tile = LOW + group * room * BR + ids[None, :] * BR + dims[:, None]
    half_tile = HALF + group * room + ids
    # BC centres at a time; each lane keeps its nearest one, and the tile in which it was
    for start in range(0, room, BC):
        c = tl.load(high_tile)
        if PARTS:
            products = tl.dot(high, tl.load(low_tile))
            products = tl.dot(high, c, products)
            products = tl.dot(low, c, products)
        else:
            products = tl.dot(high, c)
        # |x|^2 is the same for every centre, so the nearest has the smallest |c|^2 / 2 - x.c
        distance = tl.load(half_tile)[None, :] - products
        tile = tl.where(distance < best, start, tile)
        best = tl.minimum(distance, best)
        high_tile += BC * BR
        if PARTS:
            low_tile += BC * BR
        half_tile += BC
    nearest = tl.min(best, 1)
    # the lowest index among ties; a row that is nearer to nothing than infinity takes the first
    label = tl.min(tl.where(best == nearest[:, None], tile + ids[None, :], C), 1)
    label = tl.where(nearest == float("inf"), 0, label)
    if VALID is not None:
        valid = tl.load(VALID + group * N + rows, mask=rows < N, other=0)
        label = tl.where(valid != 0, label, -1)
    tl.store(LABELS + group * N + rows, label.to(tl.int64), mask=rows < N)


def tiles_for(width: int, parts: bool) -> Tiles:
    """Rows and centres of a tile that pass the compile gate."""
    if width <= 64:
        return Tiles(128, 64, 8, 2) if parts else Tiles(128, 32, 4, 2)
    return Tiles(64, 32, 8, 2) if width <= 128 else Tiles(32, 32, 8, 1)


def assign(x: Tensor, centres: Tensor, valid: Tensor | None) -> Tensor:
    """Index of the nearest centre of every row, -1 where not valid.  # [G, N] int64"""
    groups, count, rank = x.shape
    labels = torch.empty(groups, count, dtype=torch.long, device=x.device)
    if labels.numel() == 0:
        return labels
    number, width, parts = centres.shape[1], padded(rank), x.dtype != torch.float16
    size = tiles_for(width, parts)
    room = cdiv(number, size.keys) * size.keys
    high = torch.empty(groups, room, width, dtype=torch.float16, device=x.device)
    low = torch.empty_like(high) if parts else None
    split = (high, low, torch.empty(groups, room, dtype=torch.float32, device=x.device))
    tiles = cdiv(room, 32)
    centres = centres.float().contiguous()
    centres_kernel[(groups * tiles,)](centres, *split, number, room, tiles, R=rank, BC=32, BR=width)
    tiles = cdiv(count, size.rows)
    sizes = (count, number, room, tiles)
    blocks = {"R": rank, "BN": size.rows, "BC": size.keys, "BR": width, "PARTS": parts}
    assign_kernel[(groups * tiles,)](x.contiguous(), *split, as_bytes(valid), labels, *sizes, **blocks, **size.options)
    return labels


def kmeans_step(x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """-> labels [G, N] int64, centres [G, C, R] fp32, sizes [G, C] int64; no host synchronisation"""
    labels = assign(x, centres, valid)
    order, offsets = sort_labels(labels, centres.shape[1])
    means = segment_means(x[None], order[None], offsets[None], centres[None], finite=True)[0]
    return labels, means, offsets.diff(dim=-1)

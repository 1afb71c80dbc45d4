"""Which tiles a sparse attention call computes, as tensors of fixed size: built on the device, not read back.

Kept K/V groups that lie side by side are merged into runs of tokens of the group-major layout. A row of runs
has room for the worst case, every second group kept, so its size depends on shapes alone.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Route
from .shapes import cdiv


@dataclass(frozen=True)
class TileSchedule:
    runs: Tensor  # [B, H, Cq, room, 2] int32: first token and end of each merged run
    key_tiles: Tensor  # [B, H, Cq] int32: tiles of `tile_keys` keys in those runs
    tile_group: (
        Tensor  # [B, H, tiles] int32: query group of each tile, Cq for rows of no group, above: nothing
    )
    tile_start: Tensor  # [B, H, tiles] int32: its first row in the group-major order
    tile_stop: Tensor  # [B, H, tiles] int32

    @property
    def bytes(self) -> int:
        tensors = (self.runs, self.key_tiles, self.tile_group, self.tile_start, self.tile_stop)
        return sum(t.numel() * t.element_size() for t in tensors)


@triton.jit
def _latest(a, b):
    return tl.maximum(a, b)


@triton.jit
def _kept(CELLS, OFFSETS, ids, C):
    inside = (ids >= 0) & (ids < C)
    kept = tl.load(CELLS + ids, mask=inside, other=0) != 0
    start = tl.load(OFFSETS + ids, mask=inside, other=0)
    return kept & (tl.load(OFFSETS + ids + 1, mask=inside, other=0) > start)


@triton.jit
def runs_kernel(
    CELLS,  # [B, H, CQ, C] uint8
    OFFSETS,  # [B, Hkv, C + 1] int64
    RUNS,  # [B, H, CQ, room, 2] int32
    KEY_TILES,  # [B, H, CQ] int32
    H,
    shares,
    CQ,
    C,
    room,
    TILE_KEYS: tl.constexpr,
    BC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row // CQ
    CELLS += row * C
    OFFSETS += (head // H * (H // shares) + head % H // shares) * (C + 1)
    RUNS += row * room * 2
    opened = tl.zeros([], tl.int32)
    closed = tl.zeros([], tl.int32)
    tiles = tl.zeros([], tl.int32)
    latest = tl.zeros([], tl.int32)
    for first in range(0, C, BC):
        ids = first + tl.arange(0, BC)
        here = _kept(CELLS, OFFSETS, ids, C)
        opens = here & (_kept(CELLS, OFFSETS, ids - 1, C) == 0)
        closes = here & (_kept(CELLS, OFFSETS, ids + 1, C) == 0)
        start = tl.load(OFFSETS + ids, mask=ids < C, other=0).to(tl.int32)
        stop = tl.load(OFFSETS + ids + 1, mask=ids < C, other=0).to(tl.int32)
        slot = opened + tl.cumsum(opens.to(tl.int32), 0) - 1
        tl.store(RUNS + slot * 2, start, mask=opens)
        slot = closed + tl.cumsum(closes.to(tl.int32), 0) - 1
        tl.store(RUNS + slot * 2 + 1, stop, mask=closes)
        # offsets ascend, so the start of the run that closes here is the largest one opened so far
        opening = tl.maximum(tl.associative_scan(tl.where(opens, start, 0), 0, _latest), latest)
        tiles += tl.sum(tl.where(closes, (stop - opening + TILE_KEYS - 1) // TILE_KEYS, 0), 0)
        latest = tl.max(opening, 0)
        opened += tl.sum(opens.to(tl.int32), 0)
        closed += tl.sum(closes.to(tl.int32), 0)
    tl.store(KEY_TILES + row, tiles)


def schedule_tiles(route: Route, tile_rows: int, tile_keys: int) -> TileSchedule:
    """The runs of every query group and the tiles of every head, for a kernel with tiles of that size."""
    batch, heads, cq, ck = route.cells.shape
    device = route.cells.device
    # one pair more than can be filled: the kernel looks one run ahead
    room = cdiv(ck, 2) + 1
    runs = torch.empty(batch, heads, cq, room, 2, dtype=torch.int32, device=device)
    key_tiles = torch.zeros(batch, heads, cq, dtype=torch.int32, device=device)
    if key_tiles.numel() and ck:
        runs_kernel[(batch * heads * cq,)](
            route.cells.contiguous().view(torch.uint8),
            route.kv.offsets.contiguous(),
            runs,
            key_tiles,
            heads,
            heads // route.kv.offsets.shape[1],
            cq,
            ck,
            room,
            TILE_KEYS=tile_keys,
            BC=256,
            num_warps=4,
        )
    return TileSchedule(
        runs, key_tiles, *_tile_rows(route.query.offsets, route.query.order.shape[-1], tile_rows)
    )


def _tile_rows(offsets: Tensor, count: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts every query group into tiles of rows; rows of no group form one more group at the end.

    offsets [B, H, Cq + 1] -> group, start, stop [B, H, tiles] int32, `tiles` an upper bound from shapes alone
    """
    batch, heads, edges = offsets.shape
    ends = torch.nn.functional.pad(offsets, (0, 1), value=count)  # [B, H, Cq + 2]
    per_group = (ends.diff(dim=-1) + tile_rows - 1) // tile_rows  # [B, H, Cq + 1]
    last = per_group.cumsum(-1)
    tile = torch.arange(cdiv(count, tile_rows) + edges, device=offsets.device).expand(batch, heads, -1)
    group = torch.searchsorted(last, tile.contiguous(), right=True)  # [B, H, tiles]; Cq + 1: an unused tile
    known = group.clamp(max=edges - 1)
    rank = tile - (last - per_group).gather(-1, known)
    start = ends.gather(-1, known) + rank * tile_rows
    stop = torch.minimum(start + tile_rows, ends.gather(-1, known + 1))
    stop = torch.where(group < edges, stop, start)
    return group.int(), start.int(), stop.int()

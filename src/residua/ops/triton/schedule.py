"""Which tiles a sparse attention call computes, as tensors of fixed size: built on the device, not read back.

The keys of a query group are one stream: its kept K/V groups in order, neighbours merged into runs. The
stream is cut into tiles of keys; a tile may begin in one run and end in the next, so that short runs fill
tiles too. Tiles that one or two runs fill come first. A tile of three runs, or one that even three do not
fill, is a cut tile; those come last: only they need a mask and a third address. The rows of a query group are
cut into tall tiles, and into one low tile where what is left is short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Route
from .device_functions import kv_head_of
from .shapes import as_bytes, cdiv, padded

SPLIT_BITS = tl.constexpr(8)  # of each number in the word of a cut tile
SPLIT_MASK = tl.constexpr((1 << 8) - 1)


@dataclass(frozen=True)
class TileSchedule:
    """Tiles of keys for every query group, and how many tiles of rows every query group has.

    Key i of a tile is token `first base + i` of the group-major order while i is below the split, and
    `second base + i` from there on. In a cut tile the split is three numbers of 8 bits: where the second run
    begins, where the third one does, and how many keys there are.
    """

    key_tiles: Tensor  # [B, H, Cq, room, 4] int32: base of the first run, split, bases of the second and third
    counts: Tensor  # [B, H, Cq, 2] int32: full tiles (from the front), cut tiles (from the back)
    tall_ends: Tensor  # [B, H, Cq + 1] int32: running number of tall row tiles, rows of no group last
    low_ends: Tensor | None  # [B, H, Cq + 1] int32: the same of the low ones, if there are any
    rows: int  # of a tall tile; a low one has half of them

    @property
    def bytes(self) -> int:
        tensors = (self.key_tiles, self.counts, self.tall_ends, self.low_ends)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def row_tiles(self, queries: int, low: bool) -> int:
        """How many tiles of that kind a head can have at most, from shapes alone."""
        groups = self.tall_ends.shape[-1]
        return groups if low else cdiv(queries, self.rows) + groups


def key_room(keys: int, groups: int, tile_keys: int) -> int:
    """Tiles that a query group can need at most. Two runs end in every cut tile but the last, so there are
    few of them."""
    return cdiv(keys, tile_keys) + cdiv(cdiv(groups, 2), 2) + 1


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _kept(CELLS, OFFSETS, ids, C):
    """Whether each group is kept and holds a key, and where its keys begin and end."""
    here = (ids >= 0) & (ids < C)
    start = tl.load(OFFSETS + ids, mask=here, other=0).to(tl.int32)
    stop = tl.load(OFFSETS + ids + 1, mask=here, other=0).to(tl.int32)
    return (tl.load(CELLS + ids, mask=here, other=0) != 0) & (stop > start), start, stop


@triton.jit
def find_runs(CELLS, OFFSETS, RUNS, C, BC: tl.constexpr):
    """Writes begin and end of every run of kept keys that lie side by side, and counts the runs."""
    count = tl.zeros([], tl.int32)
    last = tl.full([], -1, tl.int32)  # where the keys that were kept so far end
    for first in range(0, C, BC):
        ids = first + tl.arange(0, BC)
        kept, start, stop = _kept(CELLS, OFFSETS, ids, C)
        earlier, _, end = _kept(CELLS, OFFSETS, ids - 1, C)
        before = tl.associative_scan(tl.where(earlier, end, -1), 0, _later)
        before = tl.maximum(before, last)
        opens = kept & (before != start)
        number = count + tl.cumsum(opens.to(tl.int32), 0) - 1
        tl.store(RUNS + number * 2, start, mask=opens)
        tl.store(RUNS + number * 2 - 1, before, mask=opens & (number > 0))
        last = tl.maximum(last, tl.max(tl.where(kept, stop, -1), 0))
        count += tl.sum(opens.to(tl.int32), 0)
    tl.store(RUNS + count * 2 - 1, last, mask=count > 0)
    return count


@triton.jit
def put_tile(TILES, place, first, split, second, third):
    """Writes one tile of keys, as `TileSchedule` says."""
    tl.store(TILES + place * 4, first)
    tl.store(TILES + place * 4 + 1, split)
    tl.store(TILES + place * 4 + 2, second)
    tl.store(TILES + place * 4 + 3, third)


@triton.jit
def key_tiles_kernel(
    CELLS, OFFSETS, RUNS, TILES, COUNTS, H, heads_per_kv, CQ, C, room, TILE_KEYS: tl.constexpr, BC: tl.constexpr
):
    """One program: one query group. TILES [B, H, CQ, room, 4] int32 = its kept keys in tiles of TILE_KEYS, full ones
    from the front and cut ones from the back, COUNTS [B, H, CQ, 2] int32 how many of each. CELLS [B, H, CQ, C] say
    what is kept, OFFSETS [B, Hkv, C + 1] int64 where; RUNS [B, H, CQ, (C + 1) // 2, 2] int32 are overwritten."""
    row = tl.program_id(0).to(tl.int64)
    head = row // CQ
    CELLS += row * C
    OFFSETS += kv_head_of(head, H, heads_per_kv) * (C + 1)
    RUNS += row * ((C + 1) // 2) * 2
    TILES += row * room * 4
    runs = find_runs(CELLS, OFFSETS, RUNS, C, BC)
    tl.debug_barrier()  # the runs are read by other threads than wrote them
    # the tile that is being filled: bases of its runs, and keys up to the end of the first and of the last
    first = tl.zeros([], tl.int32)
    second = tl.zeros([], tl.int32)
    split = tl.zeros([], tl.int32)
    taken = tl.zeros([], tl.int32)  # 0: there is none
    full = tl.zeros([], tl.int32)
    cut = tl.zeros([], tl.int32)
    for run in range(0, runs):
        begin = tl.load(RUNS + run * 2)
        length = tl.load(RUNS + run * 2 + 1) - begin
        # the tile that is begun takes what fits
        if taken > 0:
            live = tl.minimum(length, TILE_KEYS - taken)
            base = begin - taken  # a run goes on where the one before it ended
            if split == taken:  # there is one run in it
                second = base
                if taken + live == TILE_KEYS:
                    put_tile(TILES, full, first, split, base, base)
                    full += 1
                    taken = 0
                else:
                    taken += live
            else:
                word = split | taken << SPLIT_BITS | (taken + live) << (2 * SPLIT_BITS)
                put_tile(TILES, room - 1 - cut, first, word, second, base)
                cut += 1
                taken = 0
            begin += live
            length -= live
        # the rest of the run: full tiles, and the beginning of the next one
        if taken == 0:
            for _ in range(0, length // TILE_KEYS):
                put_tile(TILES, full, begin, TILE_KEYS, begin, begin)
                full += 1
                begin += TILE_KEYS
            taken = length % TILE_KEYS
            split = taken
            first = begin
            second = begin
    # the last tile has a mask
    if taken > 0:
        word = split | taken << SPLIT_BITS | taken << (2 * SPLIT_BITS)
        put_tile(TILES, room - 1 - cut, first, word, second, second)
        cut += 1
    tl.store(COUNTS + row * 2, full)
    tl.store(COUNTS + row * 2 + 1, cut)


@triton.jit
def row_tiles_kernel(OFFSETS, TALL, LOW, NQ, CQ, ROWS: tl.constexpr, BC: tl.constexpr):
    """One program: one head. TALL and LOW [B, H, CQ + 1] int32 = running numbers of the row tiles of its query groups,
    of OFFSETS [B, H, CQ + 1] int64; the rows of no group are one more. LOW may be None."""
    head = tl.program_id(0).to(tl.int64)
    OFFSETS += head * (CQ + 1)
    tall = tl.zeros([], tl.int32)
    low = tl.zeros([], tl.int32)
    for first in range(0, CQ + 1, BC):
        ids = first + tl.arange(0, BC)
        start = tl.load(OFFSETS + ids, mask=ids <= CQ, other=0).to(tl.int32)
        stop = tl.load(OFFSETS + ids + 1, mask=ids < CQ, other=NQ).to(tl.int32)
        size = tl.where(ids <= CQ, stop - start, 0)
        rest = size % ROWS
        high = size // ROWS + (rest > (0 if LOW is None else ROWS // 2)).to(tl.int32)
        tl.store(TALL + head * (CQ + 1) + ids, tall + tl.cumsum(high, 0), mask=ids <= CQ)
        tall += tl.sum(high, 0)
        if LOW is not None:
            short = ((rest > 0) & (rest <= ROWS // 2)).to(tl.int32)
            tl.store(LOW + head * (CQ + 1) + ids, low + tl.cumsum(short, 0), mask=ids <= CQ)
            low += tl.sum(short, 0)


@triton.jit
def tile_group(ENDS, CQ, index):
    """The query group of row tile `index` of a head: the first whose tiles end after it, CQ + 1 past the last
    tile. ENDS points to the head."""
    below = tl.zeros([], tl.int32)
    above = tl.zeros([], tl.int32) + CQ + 1
    while below < above:
        middle = (below + above) // 2
        passed = tl.load(ENDS + middle) <= index
        below = tl.where(passed, middle + 1, below)
        above = tl.where(passed, above, middle)
    return below


@triton.jit
def tile_rows(ENDS, OFFSETS, NQ, CQ, group, index, ROWS: tl.constexpr, LOW: tl.constexpr, POLICY: tl.constexpr):
    """First row (in the group-major order) of row tile `index` of a head, and the first row after it; a group
    past the last has none. What is read under another POLICY is read anew."""
    known = group <= CQ
    start = tl.load(OFFSETS + group, mask=known, other=0, eviction_policy=POLICY).to(tl.int32)
    stop = tl.load(OFFSETS + group + 1, mask=group < CQ, other=NQ, eviction_policy=POLICY).to(tl.int32)
    if LOW:
        start += (stop - start) // ROWS * ROWS
    else:
        before = tl.load(ENDS + group - 1, mask=known & (group > 0), other=0, eviction_policy=POLICY)
        start += (index - before) * ROWS
        stop = tl.minimum(start + ROWS, stop)
    return start, tl.where(known, stop, start)


def schedule_tiles(route: Route, tile_rows: int, tile_keys: int, low: bool = True) -> TileSchedule:
    """The key tiles of every query group, of `tile_keys` keys, and the row tiles of every head: tall ones of
    `tile_rows` rows, and, if `low`, one of half as many for what is left of a query group."""
    batch, heads, cq, ck = route.cells.shape
    device, queries = route.cells.device, route.query.order.shape[-1]
    room = key_room(route.kv.order.shape[-1], ck, tile_keys)
    key_tiles = torch.empty(batch, heads, cq, room, 4, dtype=torch.int32, device=device)
    counts = torch.empty(batch, heads, cq, 2, dtype=torch.int32, device=device)
    tall = torch.empty(batch, heads, cq + 1, dtype=torch.int32, device=device)
    low_ends = torch.empty_like(tall) if low else None
    if not ck:  # nothing is kept
        counts.zero_()
    elif counts.numel():
        runs = torch.empty(batch, heads, cq, cdiv(ck, 2), 2, dtype=torch.int32, device=device)
        tensors = (as_bytes(route.cells), route.kv.offsets.contiguous(), runs, key_tiles, counts)
        sizes = (heads, heads // route.kv.offsets.shape[1], cq, ck, room)
        blocks = {"TILE_KEYS": tile_keys, "BC": min(256, padded(ck))}
        key_tiles_kernel[(batch * heads * cq,)](*tensors, *sizes, **blocks, num_warps=1)
    query_offsets, block = route.query.offsets.contiguous(), min(1024, padded(cq + 1))
    row_tiles_kernel[(batch * heads,)](query_offsets, tall, low_ends, queries, cq, ROWS=tile_rows, BC=block)
    return TileSchedule(key_tiles, counts, tall, low_ends, tile_rows)

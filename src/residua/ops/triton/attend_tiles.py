"""How the attention kernel cuts its work."""

from __future__ import annotations

import torch

from .shapes import FRUGAL_GPUS, WARP_GROUP_GPUS, Tiles, architecture


def tiles_for(width: int, dtype: torch.dtype, summary: bool) -> Tiles:
    """Tile sizes without spills that fit every supported GPU; the compile gate proves it."""
    if dtype == torch.float32:
        if width <= 64:
            return Tiles(64, 32, 8, 2)
        return Tiles(16 if summary and width <= 128 else 32, 16, 8, 2 if width <= 128 else 1)
    if width <= 64 and architecture() in FRUGAL_GPUS:
        # a row per thread takes fewer instructions; for eight warps the assembler stops at 128 registers,
        # which lets a processor hold two blocks, and spills
        return Tiles(128, 64, 4, 3)
    if width <= 128:
        return Tiles(128, 64, 8, 3)
    # the two parts of a summary key of 256 columns leave registers for few rows only
    return Tiles(16 if summary else 32, 32, 8, 2)


def low_tiles(size: Tiles) -> Tiles | None:
    """Tiles for what is left of a query group below half a tall tile; None where that saves nothing."""
    if size.rows < 128:
        return None
    return Tiles(size.rows // 2, size.keys, 4, size.stages)


def columns_of(size: Tiles, low: bool, width: int) -> int:
    """Columns of an accumulator. Where single warps multiply, the compiler would spread the columns of a low
    and wide one over the warps, at half the speed: it is kept in two halves that are not wider than high."""
    if low and architecture() not in WARP_GROUP_GPUS:
        return min(width, size.rows)
    return width


def finds_drift(width: int, dtype: torch.dtype) -> bool:
    """Whether the attention kernel finds the drift of its rows itself, which spares another pass over q.
    Where single warps multiply it has no registers left for that."""
    return dtype != torch.float32 and width <= 128 and architecture() in WARP_GROUP_GPUS

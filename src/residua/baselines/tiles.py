"""The token grid divided into tiles, and the order of tokens tile by tile."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def tile_shape(grid: tuple[int, ...], tiles: int) -> tuple[int, ...]:
    """The size of a tile, close to a cube, so that about `tiles` of them cover the grid."""
    size = [1] * len(grid)
    wanted = math.prod(grid) / tiles
    while math.prod(size) < wanted and any(s < g for s, g in zip(size, grid, strict=True)):
        axis = min((i for i in range(len(grid)) if size[i] < grid[i]), key=lambda i: (size[i], -i))
        size[axis] = min(2 * size[axis], grid[axis])
    return tuple(size)


def tile_labels(grid: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The tile of every token (row-major) and the centre of every tile.  # [N], [tiles, axes]"""
    places = torch.cartesian_prod(*(torch.arange(g) for g in grid)).view(-1, len(grid))  # [N, axes]
    counts = [-(-g // s) for g, s in zip(grid, shape, strict=True)]
    labels = torch.zeros(len(places), dtype=torch.long)
    for axis, count in enumerate(counts):
        labels = labels * count + places[:, axis] // shape[axis]
    size = torch.bincount(labels)
    middle = torch.zeros(len(size), len(grid)).index_add_(0, labels, places.float()) / size[:, None]
    return labels, middle


def tile_order(grid: tuple[int, ...], tiles: int) -> Tensor:
    """The tokens tile by tile, row-major inside a tile: neighbours in this order are neighbours on the grid.

    -> [N] int64
    """
    return tile_labels(grid, tile_shape(grid, tiles))[0].argsort(stable=True)

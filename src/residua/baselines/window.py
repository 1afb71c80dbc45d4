"""Locality alone: each block of tokens sees the nearest blocks, whatever they contain."""

from __future__ import annotations

import math

import torch

from .base import Outcome, Rival, Task, register
from .selection import from_places, in_order
from .tiles import tile_labels, tile_shape


def nearest_tiles(task: Task, grid: tuple[int, ...]) -> Outcome:
    """Every query tile keeps the tiles with the nearest centres, about the same number for all."""
    shape = tile_shape(grid, task.group_counts[0])
    labels, middle = tile_labels(grid, shape)
    query, kv = from_places(task.q, labels), from_places(task.k, labels)
    distance = torch.cdist(middle / torch.tensor(shape), middle / torch.tensor(shape))  # in tiles
    place = distance.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)  # rank of a tile from each tile
    route = in_order(task, place.to(task.q.device).expand(*task.q.shape[:2], -1, -1), query, kv)
    return Outcome.routed(*task.attend(route), route, {})


@register
class Window(Rival):
    """A band along the diagonal, in the order of the tokens."""

    name = "window"
    title = "window, token order"
    source = "sliding windows, as in I. Beltagy et al., Longformer, 2020, arXiv:2004.05150"
    simplified = "the window moves in steps of a block; no global tokens"

    def refuses(self, task: Task) -> str | None:
        return None if task.rows == task.keys else "queries and keys are not the same tokens"

    def run(self, task: Task) -> Outcome:
        return nearest_tiles(task, (task.rows,))


@register
class SlidingTile(Rival):
    """Tiles of the token grid, each with the tiles around it."""

    name = "sta"
    title = "STA-like tiles"
    source = "P. Zhang et al., Fast Video Generation with Sliding Tile Attention, 2025, arXiv:2502.04507"
    simplified = "the nearest tiles that fit the budget instead of a box chosen per head by a search"

    def refuses(self, task: Task) -> str | None:
        if task.grid is None:
            return "the tokens have no grid"
        if not task.rows == task.keys == math.prod(task.grid):
            return f"the grid {task.grid} is not that of {task.rows} queries and {task.keys} keys"
        return None

    def run(self, task: Task) -> Outcome:
        assert task.grid is not None
        return nearest_tiles(task, tuple(size for size in task.grid if size > 1) or (1,))

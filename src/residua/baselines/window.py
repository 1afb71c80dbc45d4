"""Locality alone: each block of tokens sees the nearest blocks, whatever they contain."""

import math

import torch

from ..types import Partition, Route
from .groups import from_places, tile_labels, tile_shape
from .methods import METHODS, Method
from .selection import in_order
from .task import Task


@METHODS.register
class Window(Method):
    """A band along the diagonal, in the order of the tokens: every query tile keeps the tiles with the nearest centres,
    about the same number for all."""

    name = "window"
    title = "window, token order"
    source = "sliding windows, as in I. Beltagy et al., Longformer, 2020, arXiv:2004.05150"
    simplified = "the window moves in steps of a block; no global tokens"

    def grid(self, task: Task) -> tuple[int, ...]:
        """Where the tokens are."""
        return (task.rows,)

    def refuses(self, task: Task) -> str | None:
        return None if task.rows == task.keys else "queries and keys are not the same tokens"

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        grid = self.grid(task)
        labels, _ = tile_labels(grid, tile_shape(grid, task.group_counts[0]))
        return from_places(task.q, labels), from_places(task.k, labels), 0

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        grid = self.grid(task)
        shape = tile_shape(grid, task.group_counts[0])
        middle = tile_labels(grid, shape)[1] / torch.tensor(shape)  # in tiles
        distance = torch.cdist(middle, middle)
        place = distance.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)  # rank of a tile from each tile
        return in_order(task, place.to(task.q.device).expand(*task.q.shape[:2], -1, -1), query, kv), 0


@METHODS.register
class SlidingTile(Window):
    """Tiles of the token grid, each with the tiles around it."""

    name = "sta"
    title = "STA-like tiles"
    source = "P. Zhang et al., Fast Video Generation with Sliding Tile Attention, 2025, arXiv:2502.04507"
    simplified = "the nearest tiles that fit the budget instead of a box chosen per head by a search"

    def grid(self, task: Task) -> tuple[int, ...]:
        assert task.grid is not None
        return tuple(size for size in task.grid if size > 1) or (1,)

    def refuses(self, task: Task) -> str | None:
        if task.grid is None:
            return "the tokens have no grid"
        if not task.rows == task.keys == math.prod(task.grid):
            return f"the grid {task.grid} is not that of {task.rows} queries and {task.keys} keys"
        return None

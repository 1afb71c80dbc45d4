"""The ways in which methods group tokens: tiles and blocks of neighbours, k-means on activations, SparsePR's groups."""

import math

import torch
from torch import Tensor

from ..config import Config
from ..method.grouping.partition import group_tokens, kmeans
from ..method.stages import SizedCall
from ..types import Grouping, Partition
from .task import Task

STEPS, WARM_STEPS = 25, 2  # of k-means, the same as Residua's in the first call of a run, and in later ones


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


def local_order(task: Task, tokens: int) -> Tensor:
    """An order of the tokens that keeps neighbours together: tile by tile, row-major inside a tile, if there is a grid,
    otherwise unchanged.  # [N] int64"""
    if task.grid is None or math.prod(task.grid) != tokens:
        return torch.arange(tokens)
    return tile_labels(task.grid, tile_shape(task.grid, task.group_counts[0]))[0].argsort(stable=True)


def from_places(like: Tensor, labels: Tensor) -> Partition:
    """The same partition for every head.  # labels [N]"""
    groups = int(labels.max()) + 1
    labels = labels.to(like.device).expand(*like.shape[:2], -1)
    return Partition.from_labels(labels.contiguous(), groups)


def blocks_of(task: Task, x: Tensor, groups: int, multiple: int = 1) -> Partition:
    """Blocks of neighbours among the tokens of x [B, H, N, D]: about `groups`, all of one size except the last."""
    tokens = x.shape[2]
    size = -(-tokens // groups)
    size = -(-size // multiple) * multiple
    return from_places(x, local_order(task, tokens).argsort() // size)


def blocks(task: Task, multiple: int = 1) -> tuple[Partition, Partition, int]:
    """Blocks of queries and of keys, and the products needed to find them: none."""
    query_groups, kv_groups = task.group_counts
    return blocks_of(task, task.q, query_groups, multiple), blocks_of(task, task.k, kv_groups, multiple), 0


def cluster(task: Task, x: Tensor, groups: int, name: str) -> tuple[Partition, int]:
    """K-means on the rows of x [B, H, N, D]: groups, and products of one head; few steps if an earlier call stored its
    centres under this name."""
    start = task.start(name, (*x.shape[:2], groups, x.shape[-1]))
    steps = STEPS if start is None else WARM_STEPS
    start = None if start is None else start.flatten(0, 1)
    found = kmeans(x.flatten(0, 1), groups, steps, start=start, backend=task.backend)
    task.leave(name, found.centres.unflatten(0, x.shape[:2]))
    products = kmeans_products(x.shape[2], groups, steps, x.shape[-1], x.shape[-1])
    return Partition.from_labels(found.labels.unflatten(0, x.shape[:2]), groups), products


def kmeans_products(rows: int, groups: int, steps: int, rank: int, dim: int) -> int:
    """Distances of one head's k-means, as products of head-dim vectors."""
    return rows * groups * steps * rank // dim


def response_groups(task: Task, config: Config) -> Grouping:
    """SparsePR's groups."""
    return group_tokens(SizedCall.of(task.call, config, task.backend))


def response_products(task: Task, config: Config) -> int:
    """Their products: k-means in the response coordinates, and the projections into them."""
    sizes, dim = SizedCall.of(task.call, config, task.backend).sizes, task.q.shape[-1]
    products = kmeans_products(task.rows, sizes.query_groups, config.kmeans_cold, sizes.query_rank, dim)
    products += kmeans_products(task.keys, sizes.kv_groups, config.kmeans_cold, sizes.key_rank, dim)
    return task.heads * (products + task.rows * sizes.query_rank + task.keys * sizes.key_rank)

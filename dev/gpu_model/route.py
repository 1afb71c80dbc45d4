"""What the tiles of a real route look like: one head of a synthetic call is grouped and routed on the CPU,
and the tiles that the kernels would cut are counted."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from residua.config import Config
from residua.method import budget
from residua.method.grouping.partition import group_tokens
from residua.method.inputs import validate
from residua.method.rules import GPU
from residua.method.sizes import resolve
from residua.method.stages import SizedCall
from residua.ops.backend import Demand
from residua.ops.select import choose_backend
from residua.tools.synthetic import CONCENTRATIONS, VideoLike, grid_for, video_like
from residua.types import Route

TILES = ("tall_tiles", "low_tiles", "full_trips", "cut_trips", "low_full_trips", "low_cut_trips")
LLOYD_STEPS = 8  # enough for group sizes that look like those of a warm call


@dataclass(frozen=True)
class RouteTiles:
    """Counts per head. A trip is one tile of keys for one tile of rows."""

    tokens: int
    pairs: float  # that the route computes
    tall_tiles: float  # tiles of rows
    low_tiles: float
    full_trips: float  # of tall tiles
    cut_trips: float
    low_full_trips: float
    low_cut_trips: float
    small_key_tiles: float  # tiles of 32 keys, when every K/V group is walked by itself
    runs: float  # of keys side by side, that a query group keeps
    query_groups: int
    kv_groups: int
    tile: tuple[int, int]  # rows and keys of a full tile

    @property
    def issued_pairs(self) -> float:
        """Pairs that the matrix instructions compute, empty places included."""
        rows, keys = self.tile
        tall, low = self.full_trips + self.cut_trips, self.low_full_trips + self.low_cut_trips
        return keys * (rows * tall + rows // 2 * low)

    @property
    def utilisation(self) -> float:
        return self.pairs / self.issued_pairs if self.issued_pairs else 1.0


@lru_cache(maxsize=16)
def real_route(tokens: int, head_dim: int, density: float, concentration: str = "medium") -> Route:
    """The route of one head of a synthetic call, as it would be on a GPU."""
    config = Config(density=density, kmeans_cold=LLOYD_STEPS)
    recipe = VideoLike(grid_for(tokens), 1, head_dim, CONCENTRATIONS[concentration])
    call = validate(*video_like(recipe))
    backend = choose_backend("auto", Demand.of(call))
    # as many groups as on a GPU
    with torch.no_grad(), backend.session() as bound:
        sized = replace(SizedCall.of(call, config, bound), sizes=resolve(config, call, GPU))
        found = budget.decide(sized, None)
        return found.method.route(sized.grouped(group_tokens(sized), found.allowed)).route


def count_tiles(route: Route, rows: int, keys: int, low: bool) -> RouteTiles:
    """Counts the tiles of a route of one or more heads, per head.

    Args:
        route: of a CPU call.
        rows: of a tall tile.
        keys: of a tile.
        low: whether what is left of a query group may be a tile of half the rows.
    """
    heads = route.cells.shape[1]
    counts: Counter[str] = Counter()
    for head in range(heads):
        offsets = route.kv.offsets[0, head].tolist()
        for group, count in enumerate(route.query.sizes[0, head].tolist()):
            runs = _runs(route.cells[0, head, group].nonzero()[:, 0].tolist(), offsets)
            full, cut = pack(runs, keys)
            rest = count % rows
            short = int(low and 0 < rest <= rows // 2)
            tall = count // rows + int(rest > 0) - short
            counts.update(tall_tiles=tall, full_trips=tall * full, cut_trips=tall * cut, runs=len(runs))
            counts.update(low_tiles=short, low_full_trips=short * full, low_cut_trips=short * cut)
    sizes = route.kv.sizes[0].double()
    return RouteTiles(
        tokens=route.query.order.shape[-1],
        pairs=float(route.pairs.double().mean()),
        runs=counts["runs"] / max(1, heads * route.cells.shape[2]),
        **{name: counts[name] / heads for name in TILES},
        small_key_tiles=float((sizes / 32).ceil().sum() / heads),
        query_groups=route.cells.shape[2],
        kv_groups=route.cells.shape[3],
        tile=(rows, keys),
    )


def _runs(kept: list[int], offsets: list[int]) -> list[int]:
    """Lengths of the runs of kept groups that lie side by side."""
    runs: list[int] = []
    end = -1
    for group in kept:
        start, stop = offsets[group], offsets[group + 1]
        if stop == start:
            continue
        if start == end:
            runs[-1] += stop - start
        else:
            runs.append(stop - start)
        end = stop
    return runs


def pack(runs: list[int], keys: int) -> tuple[int, int]:
    """Full and cut tiles of a stream of runs, as `key_tiles_kernel` cuts them."""
    full = cut = taken = pieces = 0
    for length in runs:
        if taken:
            live = min(length, keys - taken)
            taken, length, pieces = taken + live, length - live, pieces + 1
            if pieces == 3:
                cut, taken = cut + 1, 0
            elif taken == keys:
                full, taken = full + 1, 0
        if not taken:
            full += length // keys
            taken, pieces = length % keys, 1
    return full, cut + (taken > 0)

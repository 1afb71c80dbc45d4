"""Random clips to train on and to validate with, simulated many at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from residua.world.scenes import Layout, Scene, random_layout, random_scene
from residua.world.simulator import Paths, simulate

_CHUNK = 256  # clips simulated together


@dataclass(frozen=True)
class Clips:
    """Scenes, where their balls start, and their paths."""

    scenes: list[Scene]
    layouts: list[Layout]
    paths: Paths

    def __getitem__(self, rows: slice) -> Clips:
        return Clips(self.scenes[rows], self.layouts[rows], self.paths[rows])


def draw_clips(seed: int, first: int, count: int, balls: tuple[float, ...]) -> Clips:
    """Clips number first, first + 1, ... of the endless series of a seed, with one, two and three balls in these
    shares; they must not cross the border of a chunk of 256. The same numbers always give the same clips."""
    chunk, offset = divmod(first, _CHUNK)
    assert offset + count <= _CHUNK, (first, count)
    return _chunk(seed, chunk, balls)[offset : offset + count]


@lru_cache(maxsize=4)
def _chunk(seed: int, number: int, balls: tuple[float, ...]) -> Clips:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    shares = torch.tensor(balls)
    counts = 1 + torch.multinomial(shares, _CHUNK, replacement=True, generator=generator)
    scenes = [random_scene(generator, int(count)) for count in counts]
    layouts = [random_layout(scene, generator) for scene in scenes]
    return Clips(scenes, layouts, simulate(scenes, layouts))

"""MiniMax-H3: one packed sequence of text, reference, audio and video rows. The generated video is sparse;
everything else is exact and kept for every query."""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....types import Rows
from ... import Grid
from ...site import Ranges
from .base import Family, register

VIDEO = 0  # the tag of video rows, those of references included


@dataclass(frozen=True)
class Packing:
    """Where the rows of the target video lie in the packed sequence."""

    video: Ranges
    grid: Grid


@register
class MiniMaxH3(Family):
    name = "MiniMax-H3"
    models = ("MiniMaxH3Transformer3DModel",)
    attention = r"transformer_blocks\.\d+\.attn"
    processors: Mapping[str, Any] = {"MiniMaxH3AttnProcessor": None}
    _last: tuple[Any, Any, Packing] | None = None  # weak references to tags and timestep numbers, the packing

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        return self.layout(model, inputs).grid

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        return Rows(self.layout(model, inputs).video).count

    def text(self, queries: int, keys: int, video: int, layout: Packing) -> tuple[Ranges, Ranges]:
        rest = Rows(layout.video).complement(queries).ranges
        return rest, rest

    def layout(self, model: Any, inputs: Mapping[str, Any]) -> Packing:
        """The rows of the target: the video rows with the most frequent timestep; references have another
        one. Read from the device when the layout changes."""
        tags, times = inputs["token_tags"], inputs["timestep_indices"]
        known = self._last
        if known is None or known[0]() is not tags or known[1]() is not times:
            known = (weakref.ref(tags), weakref.ref(times), _packing(tags, times, inputs["position_ids"]))
            self._last = known
        return known[2]


def _packing(tags: Any, times: Any, places: Any) -> Packing:
    is_video = (tags == VIDEO).cpu()
    times = times.cpu()
    target = is_video & (times == times[is_video].mode().values)
    rows = [int(row) for row in target.nonzero()[:, 0]]
    edges = [at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1]
    starts, stops = [0, *edges], [*edges, len(rows)]
    ranges = tuple((rows[start], rows[stop - 1] + 1) for start, stop in zip(starts, stops, strict=True))
    frames, height, width = (int(axis.unique().numel()) for axis in places.cpu()[target].T)
    fits = math.prod((frames, height, width)) == len(rows)
    return Packing(ranges, (frames, height, width) if fits else (1, 1, len(rows)))

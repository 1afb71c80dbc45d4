"""Whether the balls still move as they should. Only for clips of the model in the box: their prompts say
which balls there are, and the simulator says where they ought to be (`residua.world.physics`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InputError
from ...util import json_text
from ..generate.run import Request
from ..reports.table import Table, number

if TYPE_CHECKING:
    from ...world.physics import Physics, Track

PIPELINE = "WorldPipeline"  # only its clips have this physics
MEANING = (
    "Balls are found by their colour in every frame. A radius is that of the ball; lost counts balls that "
    "are gone, torn or merged for more than a tenth of the frames, missed the bounces that are missing or "
    "too many"
)

COLUMNS = ("method", "radii off the dense path", "off the simulator's", "balls lost", "bounces missed")


@dataclass(frozen=True)
class RunPhysics:
    """Where the balls are in a sparse clip and in the dense clip, and where they ought to be."""

    sparse: list[Track]
    dense: list[Track] | None  # None: there is no dense clip
    truth: list[Track] | None  # the simulator's; None: the first frame was given, the paths are unknown

    @property
    def from_dense(self) -> Physics | None:
        """The sparse clip against the dense one."""
        return _compared(self.sparse, self.dense)

    @property
    def from_truth(self) -> Physics | None:
        """The sparse clip against the simulator."""
        return _compared(self.sparse, self.truth)

    @property
    def dense_from_truth(self) -> Physics | None:
        """The dense clip against the simulator: the model's own errors."""
        return _compared(self.dense, self.truth)

    def columns(self) -> dict[str, Any]:
        """Columns of a row of a suite. Where the true paths are unknown, the dense clip decides what is lost."""
        if self.from_dense is None:
            return {}
        compared = self.from_truth or self.from_dense
        truth = None if self.from_truth is None else self.from_truth.position_error
        return {
            "physics_error": json_text.finite_only(truth),
            "physics_dense_error": json_text.finite_only(self.from_dense.position_error),
            "physics_kept": compared.kept,
            "physics_bounces_off": compared.bounces_missed,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = (self.from_dense, self.from_truth, self.dense_from_truth)
        names = ("sparse_from_dense", "sparse_from_simulator", "dense_from_simulator")
        plain = [None if one is None else {**asdict(one), "kept": one.kept} for one in found]
        return {name: json_text.finite_only(one) for name, one in zip(names, plain, strict=True)}


@dataclass(frozen=True)
class PhysicsRow:
    """The physics of one way to generate; distances in radii, means over the prompts."""

    from_dense: float | None
    from_truth: float | None
    lost: int  # balls, against the simulator if its paths are known, else against the dense clip
    balls: int
    missed: int  # bounces, against the same reference
    bounces: int


def run_physics(pipe: Any, request: Request, sparse: np.ndarray, dense: np.ndarray | None) -> RunPhysics | None:
    """The physics of a clip; None if its model is not the one in the box.

    Args:
        pipe: The pipeline that made the clip.
        request: What it was asked to generate.
        sparse: Frames [T, H, W, 3] in [0, 1].
        dense: The dense clip of the same request, if there is one.
    """
    return clip_physics(type(pipe).__name__, request.prompt, request.image is None, sparse, dense)


def clip_physics(
    pipeline: str, prompt: str, true_start: bool, sparse: np.ndarray, dense: np.ndarray | None
) -> RunPhysics | None:
    """The same from plain values.

    Args:
        pipeline: Class of the pipeline that made the clip.
        prompt: What it was asked for; a prompt that is no scene has no physics.
        true_start: Whether the pipeline rendered the first frame itself, so that the true paths are known.
        sparse: Frames [T, H, W, 3] in [0, 1].
        dense: The dense clip of the same prompt and seed, if there is one.
    """
    if pipeline != PIPELINE:
        return None
    from ...world.physics import track_balls, true_tracks
    from ...world.scenes import default_layout, parse_prompt
    from ...world.simulator import simulate

    try:
        scene = parse_prompt(prompt)
    except InputError:
        return None
    colours = [ball.colour for ball in scene.balls]
    truth = None
    if true_start:
        truth = true_tracks(scene, simulate([scene], [default_layout(scene)]), *sparse.shape[:3])
    found = None if dense is None else track_balls(dense, colours)
    return RunPhysics(track_balls(sparse, colours), found, truth)


def mean_physics(found: Sequence[RunPhysics | None]) -> PhysicsRow | None:
    """Mean over the sparse clips of several prompts; None if one has no physics."""
    return _row([None if one is None else (one.from_dense, one.from_truth) for one in found])


def mean_dense_physics(found: Sequence[RunPhysics | None]) -> PhysicsRow | None:
    """Mean over the dense clips of several prompts, against the simulator; None if one has no physics."""
    return _row([None if one is None else (None, one.dense_from_truth) for one in found])


def physics_table(rows: Mapping[str, PhysicsRow | None], emphasis: str | None = None) -> list[Table]:
    """A table of the physics of several ways to generate, by name; no table if none has any."""
    known = {name: row for name, row in rows.items() if row is not None}
    lines = []
    for name, row in known.items():
        errors = [number(error, "{:.3f}") for error in (row.from_dense, row.from_truth)]
        lines.append((name, *errors, f"{row.lost} of {row.balls}", f"{row.missed} of {row.bounces}"))
    return [Table("Physics", COLUMNS, tuple(lines), f"{MEANING}.", emphasis)] if lines else []


def _row(found: Sequence[tuple[Physics | None, Physics | None] | None]) -> PhysicsRow | None:
    """The row of clips that were compared with the dense clip and with the simulator; None if one has no physics."""
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    dense, truth = ([None if one is None else one.position_error for one in side] for side in zip(*known, strict=True))
    kept = [one for one in (b or a for a, b in known) if one is not None]
    return PhysicsRow(
        _mean(dense),
        _mean(truth),
        lost=sum(one.balls_lost for one in kept),
        balls=sum(one.balls for one in kept),
        missed=sum(one.bounces_missed for one in kept),
        bounces=sum(one.bounces for one in kept),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing, because a mean over other clips is not comparable."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _compared(tracks: list[Track] | None, wanted: list[Track] | None) -> Physics | None:
    from ...world.physics import compare_tracks

    return None if tracks is None or wanted is None else compare_tracks(tracks, wanted)

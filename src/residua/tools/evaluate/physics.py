"""Physics as columns of a row, for clips of the world model in the box."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import InputError
from ...world.physics import Physics, physics_of
from ...world.scenes import Scene, default_layout, parse_prompt
from .rows import Row

PIPELINE = "WorldPipeline"


def physics_columns(pipeline: str, row: Row, frames: np.ndarray, dense: np.ndarray) -> dict[str, Any]:
    """How closely the balls follow the simulator's paths and those of the dense clip; empty for other models.

    Args:
        pipeline: Class of the pipeline that made the clip: only the model in the box has this physics.
        row: The row whose prompt names the scene.
        frames: The clip, [T, H, W, 3] in [0, 1].
        dense: The dense clip of the same prompt and seed.
    """
    scene = _scene(row.prompt) if pipeline == PIPELINE else None
    if scene is None:
        return {}
    clip, reference = frames.astype(np.float32), dense.astype(np.float32)
    found: dict[str, Any] = {"physics_dense_error": _number(physics_of(clip, scene, reference).position_error)}
    # With an image the true start of the balls is unknown: the dense clip decides what is lost.
    truth = physics_of(clip, scene, reference if row.image else default_layout(scene))
    return {
        **found,
        "physics_error": None if row.image else _number(truth.position_error),
        "physics_kept": truth.kept,
        "physics_bounces_off": _bounces(truth),
    }


def _scene(prompt: str) -> Scene | None:
    try:
        return parse_prompt(prompt)
    except InputError:
        return None


def _bounces(found: Physics) -> int:
    return found.missing_bounces + found.extra_bounces


def _number(value: float) -> float | None:
    return None if value != value else value

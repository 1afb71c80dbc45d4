"""From what the user asks for to the call that is estimated."""

from __future__ import annotations

import math

from dev.gpu_model.model import Task
from residua.errors import InputError


def make_task(tokens: int | None, heads: int | None, head_dim: int | None, density: float, model: str | None) -> Task:
    """A model's call at its default size, or a call of the given shape; Wan2.2 if nothing is said.

    Args:
        tokens: overrides the model's.
        heads: overrides the model's.
        head_dim: overrides the model's.
        density: share of the pairs.
        model: a name that `residua plan` knows.
    """
    if not 0 < density <= 1:
        raise InputError(f"density={density}: wanted a number above 0, up to 1")
    from residua.tools.plan.cost import count_forward, token_grid
    from residua.tools.plan.request import find_model

    found = find_model(model or "wan2.2")
    grid = token_grid(found, found.size, found.frames)
    whole = count_forward(found, math.prod(grid)).keys
    shaped = any(value is not None for value in (tokens, heads, head_dim))
    kv_heads = found.kv_heads if found.kv_heads != found.heads and heads is None else None
    return Task(
        tokens or whole,
        heads or found.heads,
        head_dim or found.head_dim,
        density,
        kv_heads,
        f"{found.name}{', changed' if shaped and model else ''}" if model or not shaped else "a call",
    )

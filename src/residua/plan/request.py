"""From a request to its plan: what the user asked for, checked once."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import InputError
from . import cost
from .local import read_architecture
from .models import ALIASES, MODELS, Architecture
from .plan import Plan
from .speeds import MACHINES, Machine

MOST_PIXELS, MOST_FRAMES, MOST_STEPS = 1 << 16, 1 << 20, 1 << 16


def make_plan(
    model: str,
    size: str | tuple[int, int] | None = None,
    frames: int | None = None,
    steps: int | None = None,
    density: float | None = None,
    gpu: str = "h100",
) -> Plan:
    """Plans one video. `model` is a name of `MODELS`, or the path of a transformer's config.json or folder;
    `size` is width x height in pixels. What is not given is the model's own default.

    >>> make_plan("wan2.2-i2v-a14b", "1280x720", frames=81, steps=50, density=0.22, gpu="h100").speedup
    """
    architecture = find_model(model)
    machine = _find_machine(gpu)
    config = Config.paper(density=architecture.density if density is None else density)
    pixels = architecture.size if size is None else _parse_size(size)
    frames = _whole("frames", architecture.frames if frames is None else frames, MOST_FRAMES)
    steps = _whole("steps", architecture.steps if steps is None else steps, MOST_STEPS)

    grid = cost.token_grid(architecture, pixels, frames)
    tokens = math.prod(grid)
    if not tokens:
        least = [architecture.pixel_compression * patch for patch in architecture.patch[1:]]
        first = (architecture.patch[0] - 1) * architecture.frame_compression + 1
        raise InputError(
            f"size={pixels[0]}x{pixels[1]}, frames={frames}: not one token; wanted at least "
            f"{least[1]}x{least[0]} and {first} frame(s)"
        )
    forward = cost.count_forward(architecture, tokens)
    schedule = cost.schedule_calls(architecture, steps, tokens, config.density)
    call = cost.count_call(architecture, forward, tokens, config, machine.value_bytes)

    def seconds(rate: float) -> cost.Seconds:
        passes = steps * architecture.passes
        return cost.estimate_seconds(forward, passes, schedule, call, config, machine, rate)

    return Plan(
        model=architecture,
        machine=machine,
        config=config,
        size=pixels,
        frames=frames,
        steps=steps,
        grid=grid,
        forward=forward,
        schedule=schedule,
        call=call,
        seconds=seconds(machine.attention),
        seconds_fast=seconds(machine.fast_attention) if machine.fast_attention else None,
        notes=(*architecture.notes, *_notes(architecture, pixels, frames, grid, config, call)),
    )


def _notes(
    model: Architecture,
    size: tuple[int, int],
    frames: int,
    grid: tuple[int, int, int],
    config: Config,
    call: cost.Call,
) -> list[str]:
    notes = []
    whole = (grid[0] * model.patch[0] - 1) * model.frame_compression + 1
    if whole != frames:
        notes.append(
            f"{frames} frames are counted as {whole}: latents hold {model.frame_compression} frames each"
        )
    rows, columns = (n * model.pixel_compression * p for n, p in zip(grid[1:], model.patch[1:], strict=True))
    if (columns, rows) != size:
        how = "padded" if model.pads else "cropped"
        notes.append(f"{size[0]}x{size[1]} is {how} to {columns}x{rows}, whole patches")
    if call.density > config.density:
        notes.append(
            f"density {config.density:g} cannot be reached: text, probes and one cell per query group are "
            f"{call.density:.3f}"
        )
    return notes


def find_model(model: str) -> Architecture:
    """A model by its name, a common short name, its id on the hub, or the path of its config."""
    if not isinstance(model, str) or not model.strip():
        raise InputError(f"model={model!r}: wanted one of {', '.join(MODELS)}, or the path of a config.json")
    key = model.strip().lower()
    known = MODELS.get(ALIASES.get(key, key))
    if known is not None:
        return known
    looks_like_path = model.endswith(".json") or "/" in model or "\\" in model or model in (".", "..")
    if looks_like_path or _exists(model):
        return read_architecture(model)
    raise InputError(
        f"model={model[:200]!r}: no such model and no such file; wanted one of {', '.join(MODELS)}, or the "
        "path of a transformer's config.json"
    )


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _find_machine(gpu: str) -> Machine:
    machine = MACHINES.get(gpu.strip().lower()) if isinstance(gpu, str) else None
    if machine is None:
        raise InputError(f"gpu={gpu!r}: wanted one of {', '.join(MACHINES)}")
    return machine


def _parse_size(size: Any) -> tuple[int, int]:
    parts = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*[xX]\s*([0-9]{1,6})\s*", size)
        parts = tuple(int(part) for part in match.groups()) if match else None
    if not isinstance(parts, (tuple, list)) or len(parts) != 2:
        raise InputError(f"size={str(size)[:80]!r}: wanted width x height in pixels, such as 1280x720")
    width, height = (_whole("size", part, MOST_PIXELS) for part in parts)
    return width, height


def _whole(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{name}={str(value)[:80]}: wanted a whole number from 1 to {most}")
    return value

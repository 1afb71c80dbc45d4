"""Turns a user's request into a plan and checks it."""

import math
import re
from pathlib import Path
from typing import Any

from ...config import Config
from ...errors import InputError
from ...hosts import Preset, ResolvedSettings, Settings
from ...hosts.quality import find_quality
from ...util.spelling import did_you_mean
from . import cost
from .calls import time_call
from .local import read_architecture
from .memory import count_memory, find_offload, moved_weights
from .models import ALIASES, MODELS, Architecture
from .plan import Plan
from .speeds import find_machine

MAX_PIXELS, MAX_FRAMES, MAX_STEPS = 1 << 16, 1 << 20, 1 << 16


def make_plan(
    model: str,
    size: str | tuple[int, int] | None = None,
    frames: int | None = None,
    steps: int | None = None,
    density: float | None = None,
    gpu: str = "h100",
    *,
    quality: str | None = None,
    paper: bool = False,
    offload: str = "none",
) -> Plan:
    """Plans one video, as `accelerate` would run it: `quality="balanced"` unless something else is asked for.

    Args:
        model: A name of `MODELS`, a hub id, or the path of a transformer's config.json or folder.
        size: Width x height in pixels; None: the model's default, as for frames and steps.
        frames: Frames of the video.
        steps: Steps of the sampler.
        density: A fixed density instead of a quality.
        gpu: One of `MACHINES`, or an alias.
        quality: "faithful", "balanced" or "fast".
        paper: Plans the paper's method with its dense first steps and layers instead.
        offload: "none", "model" or "sequential", as diffusers offloads.

    >>> make_plan("wan2.2-i2v-a14b", "1280x720", frames=81, steps=50, gpu="h100").speedup
    """
    architecture = find_model(model)
    machine = find_machine(gpu)
    offload = find_offload(offload)
    settings, method = _settings(architecture, density, quality, paper)
    config = settings.config
    pixels = architecture.size if size is None else _parse_size(size)
    frames = _whole("frames", architecture.frames if frames is None else frames, MAX_FRAMES)
    steps = _whole("steps", architecture.steps if steps is None else steps, MAX_STEPS)
    grid = _grid(architecture, pixels, frames)
    tokens = math.prod(grid)
    first_dense = (settings.dense_steps, settings.dense_layers)
    forward = cost.count_forward(architecture, tokens)
    schedule = cost.schedule_calls(architecture, steps, tokens, config.density, first_dense)
    call = cost.count_call(architecture, forward, tokens, config, machine.value_bytes)
    timed = time_call(architecture, forward, call, config, machine)
    passes = steps * architecture.passes
    moved = moved_weights(architecture, passes, machine.value_bytes, offload)

    def seconds(rate: float) -> cost.Seconds:
        attention = passes * forward.attention_flops / (1e12 * rate)
        return cost.Seconds(
            rest=passes * forward.rest_flops / (1e12 * machine.linear),
            dense_attention=attention,
            dense_calls=schedule.dense_calls / schedule.calls * attention,
            sparse_cells=schedule.sparse_calls * timed.cells,
            overhead=schedule.sparse_calls * timed.overhead + schedule.cold_calls * timed.cold,
            transfer=moved / (1e9 * machine.link),
        )

    call_bytes = timed.peak_bytes if schedule.sparse_calls else 0
    state_bytes = schedule.cold_calls * call.state_bytes
    return Plan(
        model=architecture,
        machine=machine,
        config=config,
        method=method,
        size=pixels,
        frames=frames,
        steps=steps,
        grid=grid,
        forward=forward,
        schedule=schedule,
        call=call,
        timed=timed,
        memory=count_memory(architecture, forward, machine, offload, call_bytes, state_bytes),
        seconds=seconds(machine.attention),
        seconds_fast=seconds(machine.fast_attention) if machine.fast_attention else None,
        notes=(*architecture.notes, *_notes(architecture, pixels, frames, grid, config, call)),
    )


def _settings(
    model: Architecture, density: float | None, quality: str | None, paper: bool
) -> tuple[ResolvedSettings, str]:
    """The settings to plan, and their name."""
    if quality is not None and (paper or density is not None):
        other = "paper" if paper else "density"
        raise InputError(f"quality={quality!r} together with {other}: a quality sets both; leave one out")
    preset = Preset(model.density, model.dense_steps, model.dense_layers, model.name)
    found = Settings(density=density, quality=quality, method="paper" if paper else None).resolve(preset)
    if paper:
        return found, (
            f"the paper's method, {found.config.density:.0%} of the pairs (accelerate(pipe, config=Config.paper()))"
        )
    if density is not None:
        return found, f"a fixed density of {density:g} (accelerate(pipe, density={density:g}))"
    wanted = find_quality(found.quality)
    return found, (
        f'quality "{wanted.name}": a shared budget of {wanted.density:.0%} of dense attention; its guard of '
        f"{wanted.max_error:g} may spend more on hard heads, which is not planned; no step and no layer is "
        f'dense by rule (accelerate(pipe, quality="{wanted.name}"))'
    )


def _grid(model: Architecture, pixels: tuple[int, int], frames: int) -> tuple[int, int, int]:
    grid = cost.token_grid(model, pixels, frames)
    if math.prod(grid):
        return grid
    least = [model.pixel_compression * patch for patch in model.patch[1:]]
    first = (model.patch[0] - 1) * model.frame_compression + 1
    raise InputError(
        f"size={pixels[0]}x{pixels[1]}, frames={frames}: not one token; wanted at least "
        f"{least[1]}x{least[0]} and {first} frame(s)"
    )


def _notes(
    model: Architecture,
    size: tuple[int, int],
    frames: int,
    grid: tuple[int, int, int],
    config: Config,
    call: cost.CallCost,
) -> list[str]:
    notes = []
    whole = (grid[0] * model.patch[0] - 1) * model.frame_compression + 1
    if whole != frames:
        notes.append(f"{frames} frames are counted as {whole}: latents hold {model.frame_compression} frames each")
    rows, columns = (n * model.pixel_compression * p for n, p in zip(grid[1:], model.patch[1:], strict=True))
    if (columns, rows) != size:
        how = "padded" if model.pads else "cropped"
        notes.append(f"{size[0]}x{size[1]} is {how} to {columns}x{rows}, whole patches")
    asked = config.density
    if config.moves_budget:  # for what may be skipped, beside the text
        asked = call.text_density + (1 - call.text_density) * asked
        if call.text_density >= 0.005:
            notes.append(f"text takes {call.text_density:.1%} of all pairs, beside the budget")
    if call.density > asked * (1 + 1e-9):
        notes.append(
            f"density {config.density:g} cannot be reached: text, probes, "
            f"{'router, summary ' * config.summarises}and one cell per query group are {call.density:.3f}"
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
    like_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not model.endswith(".json")
    like_path = model.endswith(".json") or "/" in model or "\\" in model or model in (".", "..")
    if _exists(model) or (like_path and not like_hub_id):
        return read_architecture(model)
    hint = did_you_mean(key[:200], [*MODELS, *ALIASES])
    raise InputError(
        f"model={model[:200]!r}: no such model and no such file; wanted one of {', '.join(MODELS)}, the hub "
        f"id of one, or the path of a transformer's config.json{hint}"
    )


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that cannot be a file name
        return False


def _parse_size(size: Any) -> tuple[int, int]:
    parts = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*[xX]\s*([0-9]{1,6})\s*", size)
        parts = tuple(int(part) for part in match.groups()) if match else None
    if not isinstance(parts, (tuple, list)) or len(parts) != 2:
        raise InputError(f"size={str(size)[:80]!r}: wanted width x height in pixels, such as 1280x720")
    width, height = (_whole("size", part, MAX_PIXELS) for part in parts)
    return width, height


def _whole(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{name}={str(value)[:80]}: wanted a whole number from 1 to {most}")
    return value

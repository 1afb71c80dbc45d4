"""Checks what the user of a host asked for."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..baselines.methods import find_method
from ..config import Config
from ..errors import InputError
from .quality import DEFAULT_QUALITY, find_quality

# With fewer tokens, grouping and routing cost more than the skipped pairs save.
MIN_TOKENS = 4096


@dataclass(frozen=True)
class Preset:
    """Settings for a model family. A whole number is a count of steps or layers, a fraction a share of
    them."""

    density: float
    dense_steps: float
    dense_layers: float
    source: str


@dataclass(frozen=True)
class Settings:
    """How one transformer is accelerated.

    Args:
        config: How a sparse call is approximated.
        dense_steps: First steps that stay dense: a whole number is a count, a fraction a share.
        dense_layers: First layers that stay dense, in the same form.
        layers: The layers that may be sparse, by number or (wild-card) name; None: all.
        min_tokens: Calls with fewer video tokens stay dense; None: depends on the device.
        quality: The name of the quality that was asked for, if any.
        method: The method of the sparse calls by name (`residua.baselines.methods`); None: Residua, as the config says.
    """

    config: Config
    dense_steps: float = 0
    dense_layers: float = 0
    layers: tuple[int | str, ...] | None = None
    min_tokens: int | None = None
    quality: str | None = None
    method: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "quality": self.quality,
            "method": self.method,
            "config": self.config.to_dict(),
            "dense_steps": self.dense_steps,
            "dense_layers": self.dense_layers,
            "layers": None if self.layers is None else list(self.layers),
            "min_tokens": self.min_tokens,
        }


def min_tokens_for(device: torch.device) -> int:
    """How many video tokens a call needs on this device before sparse attention saves time. For a GPU this is
    an estimate of the static cost model, not a measurement."""
    if device.type != "cuda":
        return MIN_TOKENS
    from .break_even import break_even, nearest_gpu

    gpu = nearest_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return max(MIN_TOKENS, break_even(gpu))


def make_settings(
    preset: Preset,
    density: float | None = None,
    config: Config | None = None,
    dense_steps: float | None = None,
    dense_layers: float | None = None,
    layers: Sequence[int | str] | None = None,
    min_tokens: int | None = None,
    quality: str | None = None,
    method: str | None = None,
) -> Settings:
    """Checks what the user asked for. Without `density`, `config`, `quality` and `method` it is the default
    quality. Only the paper's method and the methods of others keep the first steps and layers of the
    family's preset dense; Residua decides by its error estimate.

    Args:
        preset: The values of the model's family.
        density: Share of dense attention that every head may spend.
        config: All settings of the method.
        dense_steps: First steps that stay dense: a whole number, or a share below 1.
        dense_layers: First layers that stay dense, in the same form.
        layers: The only layers that are sparse, by number or by name with wild cards; None: all.
        min_tokens: Calls with fewer video tokens stay dense; None: by the device.
        quality: "faithful", "balanced" or "fast".
        method: Another method by name, such as "paper".

    Returns:
        The settings; `InputError` names an argument that is not valid.
    """
    if density is None and config is None and quality is None and method is None:
        quality = DEFAULT_QUALITY
    wanted = _config(preset, density, config, quality)
    wanted = wanted if method is None else find_method(method).settings(wanted)
    by_estimate = wanted.summarises and method in (None, "anchored", "tail")
    steps_by_default, layers_by_default = (0, 0) if by_estimate else (preset.dense_steps, preset.dense_layers)
    return Settings(
        config=wanted,
        dense_steps=check_share("dense_steps", steps_by_default if dense_steps is None else dense_steps),
        dense_layers=check_share("dense_layers", layers_by_default if dense_layers is None else dense_layers),
        layers=None if layers is None else _selection(layers),
        min_tokens=None if min_tokens is None else check_count("min_tokens", min_tokens),
        quality=quality,
        method=method,
    )


def _config(preset: Preset, density: float | None, config: Config | None, quality: str | None) -> Config:
    if config is not None and not isinstance(config, Config):
        raise InputError(f"config={config!r}: wanted a residua.Config; to change the density alone, pass density=")
    if quality is not None:
        wanted = find_quality(quality)
        given = [name for name, value in (("density=", density), ("config=", config)) if value is not None]
        if given:
            raise InputError(
                f"quality={quality!r} together with {' and '.join(given)}: a quality sets the budget and the "
                "error bound; leave one of them out, or pass "
                f"config=Config(balance=True, max_error={wanted.max_error:g}, density=...) alone"
            )
        return wanted.config()
    base = Config(density=preset.density) if config is None else config
    return base if density is None else base.replace(density=density)


def part_of(share: float, total: int) -> int:
    """A whole number as it is; a fraction of `total`, rounded up (0.03 of 40 layers is 2)."""
    return share if isinstance(share, int) else math.ceil(share * total - 1e-9)


def chosen_layers(selection: tuple[int | str, ...] | None, names: list[str]) -> set[int]:
    """Indices of the layers that `layers=` names, by number or by (wild-card) module name."""
    if selection is None:
        return set(range(len(names)))
    chosen: set[int] = set()
    for item in selection:
        if isinstance(item, int):
            found = [range(len(names))[item]] if -len(names) <= item < len(names) else []
        else:
            found = [index for index, name in enumerate(names) if fnmatch.fnmatchcase(name, item)]
        if not found:
            raise InputError(
                f"layers={list(selection)!r}: no layer {item!r}; wanted numbers from 0 to {len(names) - 1}, "
                f"or names such as {names[0]!r}"
            )
        chosen.update(found)
    return chosen


def check_share(name: str, value: Any) -> float:
    """Checks a number of first steps or layers: a count, or a share."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not whole and not (isinstance(value, float) and 0.0 <= value <= 1.0):
        raise InputError(f"{name}={value!r}: wanted a whole number, or a share from 0.0 to 1.0")
    return value


def check_count(name: str, value: Any) -> int:
    """Checks a whole number that is at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{name}={value!r}: wanted a whole number of at least 0")
    return value


def _selection(layers: Any) -> tuple[int | str, ...]:
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise InputError(f"layers={layers!r}: wanted a list of layer numbers or names")
    for item in layers:
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            raise InputError(f"layers={list(layers)!r}: wanted layer numbers or names, got {item!r}")
    return tuple(layers)

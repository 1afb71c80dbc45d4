"""What the user asks of a pipeline, checked once, and what it means for one transformer."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..baselines.methods import find_method
from ..config import Config
from ..errors import InputError
from .quality import DEFAULT_QUALITY, find_quality

# With fewer tokens, grouping and routing cost more than the skipped pairs save.
MIN_TOKENS = 4096
# From how many tokens on sparse attention saves time on a GPU: estimates, not measurements.
# By the stored estimates (`residua.tools.plan.estimates`), which a test holds these numbers to.
BREAK_EVEN = {"h100": 8192, "h200": 8192, "a100": 7168, "4090": 6144, "l40s": 8192, "5090": 6144, "b200": 17408}
DIALS = ("density", "max_error", "reconstruction")  # settings of the config that can be given alone


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
    """What the user asks of a pipeline: the keywords of `accelerate`, the options of the commands, a profile, a
    setting of a suite. `InputError` names a value that is not valid.

    Args:
        config: All settings of the method; None: the default with the density of the model family.
        density: Share of dense attention that every head may spend; overrides the config's, like the next two.
        max_error: Bound on the estimated error of every head.
        reconstruction: What stands for skipped pairs.
        quality: "faithful", "balanced" or "fast", instead of all of the above; the default if nothing is given.
        method: Another method by name, such as "paper" (`residua.baselines.methods`).
        dense_steps: First steps that stay dense: a whole number is a count, a fraction a share; None: the family's
            for the paper's method and for those of others, none for Residua, which decides by its error estimate.
        dense_layers: First layers that stay dense, in the same form.
        layers: The only layers that may be sparse, by number or by name with wild cards; None: all.
        min_tokens: Calls with fewer video tokens stay dense; None: depends on the device.
    """

    config: Config | None = None
    density: float | None = None
    max_error: float | None = None
    reconstruction: str | None = None
    quality: str | None = None
    method: str | None = None
    dense_steps: float | None = None
    dense_layers: float | None = None
    layers: Sequence[int | str] | None = None
    min_tokens: int | None = None

    def __post_init__(self) -> None:
        """Checks everything that needs no model."""
        if self.config is not None and not isinstance(self.config, Config):
            raise InputError(
                f"config={self.config!r}: wanted a residua.Config; to change the density alone, pass density="
            )
        if self.quality is not None:
            self._check_quality_alone()
        config = (self.config or Config()).replace(**self._dials)
        if self.method is not None:
            find_method(self.method).settings(config)
        for name, check in CHECKS.items():
            if getattr(self, name) is not None:
                check(name, getattr(self, name))

    def _check_quality_alone(self) -> None:
        wanted = find_quality(self.quality)
        given = [f"{name}=" for name in (*DIALS, "config") if getattr(self, name) is not None]
        if given:
            raise InputError(
                f"quality={self.quality!r} together with {' and '.join(given)}: a quality sets the budget and the "
                "error bound; leave one of them out, or pass "
                f"config=Config(balance=True, max_error={wanted.max_error:g}, density=...) alone"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The settings that a file names.

        Args:
            values: Plain values by name; `config` is a table.

        Returns:
            The settings; `InputError` names a value that is not valid.
        """
        config = values.get("config")
        return cls(**{**values, "config": None if config is None else Config.from_dict(config)})

    @property
    def _dials(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DIALS if getattr(self, name) is not None}

    @property
    def is_residua(self) -> bool:
        """Whether this is Residua's own method, not the paper's or another's."""
        if self.method is not None:
            return self.method == "anchored"
        return self.quality is not None or self._config(Config().density).reconstruction == "anchored"

    def _config(self, density: float) -> Config:
        """The config that was asked for; `density` if nothing says how much may be spent."""
        if self.quality is not None:
            return find_quality(self.quality).config()
        return (self.config or Config(density=density)).replace(**self._dials)

    def resolve(self, preset: Preset) -> ResolvedSettings:
        """Fills in what was not given.

        Args:
            preset: The values of the model's family.

        Returns:
            The settings of one transformer.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if all(given[name] is None for name in ("config", *DIALS, "quality", "method")):
            return Settings(**{**given, "quality": DEFAULT_QUALITY}).resolve(preset)
        config = self._config(preset.density)
        config = config if self.method is None else find_method(self.method).settings(config)
        by_estimate = config.summarises and self.method in (None, "anchored", "tail")
        steps, layers = (0, 0) if by_estimate else (preset.dense_steps, preset.dense_layers)
        return ResolvedSettings(
            config=config,
            dense_steps=steps if self.dense_steps is None else self.dense_steps,
            dense_layers=layers if self.dense_layers is None else self.dense_layers,
            layers=None if self.layers is None else tuple(self.layers),
            min_tokens=self.min_tokens,
            quality=self.quality,
            method=self.method,
        )


@dataclass(frozen=True)
class ResolvedSettings:
    """How one transformer is accelerated: `Settings` with nothing left open but what the device decides."""

    config: Config
    dense_steps: float = 0
    dense_layers: float = 0
    layers: tuple[int | str, ...] | None = None
    min_tokens: int | None = None  # None: depends on the device
    quality: str | None = None  # the name of the quality that was asked for, if any
    method: str | None = None  # None: Residua, as the config says


def min_tokens_for(device: torch.device) -> int:
    """How many video tokens a call needs on this device before sparse attention saves time. For a GPU this is
    an estimate of the static cost model, not a measurement."""
    if device.type != "cuda":
        return MIN_TOKENS
    gpu = nearest_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return max(MIN_TOKENS, BREAK_EVEN[gpu])


def nearest_gpu(name: str, capability: tuple[int, int]) -> str:
    """The GPU of the table that a real one is taken for: by its name, otherwise by its generation."""
    by_name = [gpu for gpu in BREAK_EVEN if gpu in name.lower()]
    if by_name:
        return by_name[0]
    by_generation = {8: "4090" if capability[1] else "a100", 9: "h100", 10: "b200", 12: "5090"}
    found = by_generation.get(capability[0], "h100")
    return found if found in BREAK_EVEN else next(iter(BREAK_EVEN))


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


def _check_layers(name: str, layers: Any) -> None:
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise InputError(f"{name}={layers!r}: wanted a list of layer numbers or names")
    for item in layers:
        if isinstance(item, bool) or not isinstance(item, (int, str)):
            raise InputError(f"{name}={list(layers)!r}: wanted layer numbers or names, got {item!r}")


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "dense_steps": check_share,
    "dense_layers": check_share,
    "layers": _check_layers,
    "min_tokens": check_count,
}

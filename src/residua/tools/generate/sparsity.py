"""How a pipeline is accelerated in a generation that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...baselines.methods import find_method
from ...config import Config
from ...hosts import find_quality
from ...hosts.diffusers import Handle, accelerate, preset_config
from ...hosts.settings import check_count, check_share


@dataclass(frozen=True)
class Sparsity:
    """How a pipeline is accelerated; None takes the preset of the model family."""

    config: Config | None = None
    density: float | None = None  # overrides the config's, like the next two
    dense_steps: float | None = None
    dense_layers: float | None = None
    min_tokens: int | None = None
    max_error: float | None = None
    reconstruction: str | None = None
    quality: str | None = None  # instead of a config and its overrides
    method: str | None = None  # the method of the sparse calls; None: Residua, as the config says

    def __post_init__(self) -> None:
        """Checks the settings now, not after a model is loaded."""
        if self.quality is not None:
            find_quality(self.quality)
        config = (self.config or Config()).replace(**self._changes)
        if self.method is not None:
            find_method(self.method).settings(config)
        for name in ("dense_steps", "dense_layers"):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name))
        if self.min_tokens is not None:
            check_count("min_tokens", self.min_tokens)

    @property
    def is_residua(self) -> bool:
        """Whether this is Residua's own method, not the paper's or another's."""
        if self.method is not None:
            return self.method == "anchored"
        config = (self.config or Config()).replace(**self._changes)
        return self.quality is not None or config.reconstruction == "anchored"

    @property
    def _changes(self) -> dict[str, Any]:
        given = {"density": self.density, "max_error": self.max_error, "reconstruction": self.reconstruction}
        return {name: value for name, value in given.items() if value is not None}

    def accelerate(self, pipe: Any, time_stages: bool) -> Handle:
        config = self.config
        if self._changes:
            config = (config or preset_config(pipe)).replace(**self._changes)
        return accelerate(
            pipe,
            quality=self.quality,  # type: ignore[arg-type]
            config=config,
            method=self.method,
            dense_steps=self.dense_steps,
            dense_layers=self.dense_layers,
            min_tokens=self.min_tokens,
            time_stages=time_stages,
        )

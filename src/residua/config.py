"""How a call is approximated: one frozen dataclass, validated here and nowhere else."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCORES = ("mass", "centroid")
PROBE_POLICIES = ("stratified", "random", "uniform", "scattered")
MAX_TOML_BYTES = 1 << 20


@dataclass(frozen=True)
class Config:
    """How a call is approximated. `Config()` is what we recommend; `Config.paper()` is SparsePR to the
    letter.

    `density` is what a call may cost, as a share of dense attention. With the repairs "anchored" and "tail"
    it pays for everything: exact pairs, probe rows, the router, the tail. With "probe" (the paper's) and
    "none" it counts exact pairs alone. `max_error` turns the dial around: each head then spends what keeps
    its estimated error below the bound, `density` is the most it may spend, and what cannot be kept below
    runs dense. `balance` moves the budget between the heads of a call to where the error is. Both learn
    from call to call and need a `State`. Group counts of `None` follow the token count (see
    `residua.sizing.default_groups`)."""

    density: float = 0.22
    repair: str = "anchored"
    max_error: float | None = None
    balance: bool = False
    query_groups: int | None = None
    kv_groups: int | None = None
    key_rank: int = 48
    query_rank: int = 64
    metric_rows: int = 2048
    kmeans_cold: int = 25
    kmeans_warm: int = 2
    partition: str = "response"
    score: str = "mass"
    probes: int = 64
    probe_policy: str | None = None  # None: the repair's own
    repair_rank: int = 16  # "probe" only, as the next two
    ridge: float = 0.1
    subspace: bool = True
    tail_slots: int | None = None  # "anchored" and "tail": extra keys per query group; None: by token count
    drift_rank: int = 16  # "anchored" only
    backend: str = "auto"
    check_finite: bool = False

    @classmethod
    def paper(cls, **changes: Any) -> Config:
        """The paper's method: probe-fitted residual reconstruction, density counted in exact pairs."""
        return cls(**{"repair": "probe", **changes})

    def __post_init__(self) -> None:
        _number(self, "density", above=0.0, most=1.0)
        _number(self, "ridge", least=0.0, most=1e12)
        for name in ("key_rank", "query_rank", "metric_rows", "kmeans_cold", "kmeans_warm", "repair_rank"):
            _integer(self, name, least=1)
        _integer(self, "probes", least=0)
        _integer(self, "drift_rank", least=0)
        for name in ("query_groups", "kv_groups", "tail_slots"):
            if getattr(self, name) is not None:
                _integer(self, name, least=1)
        from .grouping.partition import PARTITIONERS  # the registries know the names, and they need Config
        from .repair import REPAIRS

        _choice(self, "partition", tuple(PARTITIONERS))
        _choice(self, "score", SCORES)
        _choice(self, "repair", tuple(REPAIRS))
        if self.probe_policy is not None:
            _choice(self, "probe_policy", PROBE_POLICIES)
        for name in ("subspace", "check_finite", "balance"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"Config.{name}={getattr(self, name)!r}: wanted true or false")
        if not isinstance(self.backend, str):
            raise InputError(f"Config.backend={self.backend!r}: wanted a name such as 'auto' or 'portable'")
        self._check_control(REPAIRS[self.repair].all_in)

    def _check_control(self, estimates: bool) -> None:
        """The dials that need an error estimate from rows that no fit has seen."""
        if self.max_error is not None:
            _number(self, "max_error", above=0.0, most=1.0)
        for name, wanted in (("max_error", self.max_error is not None), ("balance", self.balance)):
            if wanted and not (estimates and self.probes):
                raise InputError(
                    f"Config.{name} needs an error estimate of every call: use repair='anchored' or 'tail' "
                    f"with probes (given: repair={self.repair!r}, probes={self.probes})"
                )
        if self.max_error is not None and self.balance:
            raise InputError("Config.max_error and Config.balance both move the budget: give one of them")

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed, validated again."""
        return Config.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Builds a Config from plain values; a name that does not exist is an error, not ignored."""
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(str(name) for name in settings if name not in known)
        if unknown:
            raise InputError(f"unknown setting {', '.join(unknown)}; Config has: {', '.join(known)}")
        return cls(**settings)

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """Loads settings from a TOML file, from its `[residua]` table if it has one."""
        path = Path(path)
        try:
            if path.stat().st_size > MAX_TOML_BYTES:
                raise InputError(f"{path}: larger than {MAX_TOML_BYTES} bytes; a Config is a few lines")
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(
                f"{path}: not valid TOML ({error}); write lines such as `density = 0.22`"
            ) from error
        table = data.get("residua", data)
        if not isinstance(table, dict):
            raise InputError(f"{path}: `residua` is {type(table).__name__}; wanted a table [residua]")
        return cls.from_dict(table)


def _number(
    config: Config, name: str, *, most: float, least: float = -math.inf, above: float = -math.inf
) -> None:
    value = getattr(config, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (least <= value <= most and value > above):
        low = f"above {above:g}" if above > -math.inf else f"from {least:g}"
        raise InputError(f"Config.{name}={value!r}: wanted a number {low} to {most:g}")


def _integer(config: Config, name: str, *, least: int) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"Config.{name}={value!r}: wanted a whole number of at least {least}")


def _choice(config: Config, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise InputError(f"Config.{name}={value!r}: wanted one of {', '.join(map(repr, choices))}")

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
REPAIRS = ("probe", "none")
PROBE_POLICIES = ("stratified", "random", "uniform")
MAX_TOML_BYTES = 1 << 20


@dataclass(frozen=True)
class Config:
    """The settings of SparsePR; the defaults are the paper's.

    `density` is the share of query-key pairs that may be evaluated, probe rows and pinned keys included.
    Group counts of `None` follow the token count (see `residua.sizing.default_groups`).
    """

    density: float = 0.22
    query_groups: int | None = None
    kv_groups: int | None = None
    key_rank: int = 48
    query_rank: int = 64
    metric_rows: int = 2048
    kmeans_cold: int = 25
    kmeans_warm: int = 2
    probes: int = 64
    repair_rank: int = 16
    ridge: float = 0.1
    partition: str = "response"
    score: str = "mass"
    repair: str = "probe"
    subspace: bool = True
    probe_policy: str = "stratified"
    backend: str = "auto"
    check_finite: bool = False

    def __post_init__(self) -> None:
        _number(self, "density", above=0.0, most=1.0)
        _number(self, "ridge", least=0.0, most=1e12)
        for name in ("key_rank", "query_rank", "metric_rows", "kmeans_cold", "kmeans_warm", "repair_rank"):
            _integer(self, name, least=1)
        _integer(self, "probes", least=0)
        for name in ("query_groups", "kv_groups"):
            if getattr(self, name) is not None:
                _integer(self, name, least=1)
        from .grouping.partition import PARTITIONERS  # the registry knows the names, and it needs Config

        _choice(self, "partition", tuple(PARTITIONERS))
        _choice(self, "score", SCORES)
        _choice(self, "repair", REPAIRS)
        _choice(self, "probe_policy", PROBE_POLICIES)
        for name in ("subspace", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"Config.{name}={getattr(self, name)!r}: wanted true or false")
        if not isinstance(self.backend, str):
            raise InputError(f"Config.backend={self.backend!r}: wanted a name such as 'auto' or 'portable'")

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

"""How a call is approximated: one frozen dataclass, validated here and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .errors import InputError
from .util.spelling import did_you_mean
from .util.toml_text import read_toml

SCORES = ("mass", "centroid", "value-error")
METRIC_SPACINGS = ("golden", "even")
BUDGET_SCOPES = ("head", "query-group")
PROBE_ORDERS = ("spread", "largest", "index")
PROBE_POLICIES = ("stratified", "random", "uniform", "scattered")
RULES = ("auto", "cpu", "gpu")
READS_LOW = ("stratified",)  # policies that pick easy rows, so that their error estimate is too low
MAX_KMEANS_STEPS = 1000  # k-means converges long before, unless its groups alternate for ever
# With a shared budget, a head that would need a density above this runs dense instead.
MAX_BALANCED_DENSITY = 0.6

Kind = TypeVar("Kind", bound=type)


class Traits(NamedTuple):
    """What settings depend on of a reconstruction."""

    all_in: bool  # whether `density` pays for everything, not for exact pairs alone
    takes_probes: bool


# The names to choose from. `method` registers what they stand for, and adds here what others register.
PARTITIONS = {"response", "key-response", "semantic"}
RECONSTRUCTION_TRAITS = {
    "anchored": Traits(all_in=True, takes_probes=True),
    "tail": Traits(all_in=True, takes_probes=True),
    "probe": Traits(all_in=False, takes_probes=True),
    "none": Traits(all_in=False, takes_probes=False),
}


def _names_checked(kind: Kind) -> Kind:
    """Lets a dataclass refuse a name that it does not have with the right one; its own error has no hint."""
    init = vars(kind)["__init__"]

    @functools.wraps(init)  # keeps the signature for help and editors
    def checked(self: object, *settings: Any, **named: Any) -> None:
        _refuse_unknown(kind, named)
        init(self, *settings, **named)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


@_names_checked
@dataclass(frozen=True)
class Config:
    """How a call is approximated. `Config()` is what we recommend; `Config.paper()` is the paper's method.

    `max_error` and `balance` learn from call to call and need a `State`.

    Attributes:
        density: What a call may cost, as a share of dense attention. With the reconstructions "anchored" and
            "tail" it pays for everything: exact pairs, probe rows, router, summary. With "probe" (the
            paper's) and "none" it counts exact pairs alone. Exact rows and pinned keys (text) are paid from
            it, with at most half of it where skipped pairs are summarised: what they take beyond that comes
            on top. With `max_error` or `balance` all of it comes on top.
        reconstruction: What stands for skipped pairs: "anchored", "tail", "probe" or "none".
        max_error: A bound on the estimated mean relative row error of every head. Each head then spends as
            much as it needs to stay below the bound, at most `density`; a head that cannot stay below it runs
            dense. None: no bound.
        balance: Whether heads share the budget: `density` is then their mean, and pairs go to the heads in
            which they reduce the error most. Layers share it too if their states do (`State(shared)`), and a
            host that knows the noise levels of its steps gives more to those that remove more noise. With
            `max_error` as well, a head above the bound may spend more than its part.
        query_groups: Groups of queries per head; None: chosen from the token count, and from the density
            where skipped groups are summarised (`residua.method.sizes`).
        kv_groups: Groups of keys and values per head; None: chosen in the same way.
        key_rank: Dimensions in which keys are compared.
        query_rank: Dimensions in which queries are compared.
        metric_rows: Query rows from which the call learns how queries respond to keys.
        metric_spacing: How these rows are spaced: by the "golden" ratio, or "even", which may alias with the
            picture's width.
        kmeans_cold: K-means steps of the first call of a run.
        kmeans_warm: K-means steps of later calls, which start from the groups of the call before.
        regroup_every: The most calls for which tokens keep their groups before they are clustered again; on a CPU a
            head whose rows have moved away from their groups is clustered earlier. 1: every call clusters.
        partition: How tokens are grouped: "response" (the paper's), "key-response" or "semantic".
        score: How cells are scored: "mass" (exact over the keys of a group), "centroid" (as if all keys of a
            group lay at its centroid), or "value-error" ("centroid" times the distance of the values from
            their centroid). "tail" scores them by the centres of its groups, whatever this says.
        budget_scope: "head": the pairs of a head go to its best cells, wherever they are. "query-group":
            every query group gets the same number of keys, and the cell that crosses this number is kept too.
        probes: Query rows per head that are computed exactly; None: 64, or fewer where these would take
            much of the budget of a call that summarises what it skips, or more than one row in 100.
        probe_policy: How probes are placed: "stratified", "random", "uniform" or "scattered"; None: the
            default of the reconstruction.
        probe_order: In which order stratified probes visit the query groups: "spread", "largest" or "index".
        residual_rank: Rank of the fitted map; "probe" only.
        ridge: Strength of the fit's ridge penalty; "probe" only.
        subspace: Whether the fit is restricted to the leading directions of the residuals; "probe" only.
        summary_slots: Keys per query group that stand for skipped groups; "anchored" and "tail" only; None:
            chosen from token count and density.
        drift_rank: Directions in which the summary follows a row away from its anchor; "anchored" only; None:
            chosen from token count and density.
        rules: What differs between kinds of device (`residua.method.rules`): "cpu", "gpu", or "auto" for those
            of the device that holds the tensors. Both run on any device.
        backend: Name of a backend, or "auto" for the best one that takes the call.
        check_finite: Whether NaN or Inf in the input raises instead of being passed on.
    """

    density: float = 0.22
    reconstruction: str = "anchored"
    max_error: float | None = None
    balance: bool = False
    query_groups: int | None = None
    kv_groups: int | None = None
    key_rank: int = 48
    query_rank: int = 64
    metric_rows: int = 2048
    metric_spacing: str = "golden"
    kmeans_cold: int = 25
    kmeans_warm: int = 2
    regroup_every: int = 8
    partition: str = "response"
    score: str = "mass"
    budget_scope: str = "head"
    probes: int | None = None
    probe_policy: str | None = None
    probe_order: str = "spread"
    residual_rank: int = 16
    ridge: float = 0.1
    subspace: bool = True
    summary_slots: int | None = None
    drift_rank: int | None = None
    rules: str = "auto"
    backend: str = "auto"
    check_finite: bool = False

    @classmethod
    def paper(cls, **changes: Any) -> Config:
        """The paper's method: probe-fitted residual reconstruction, density counted in exact pairs.

        Args:
            **changes: Settings that differ from the paper's.

        Returns:
            A Config.
        """
        theirs = {"reconstruction": "probe", "probes": 64, "metric_spacing": "even", "regroup_every": 1}
        return cls(**{**theirs, **changes})

    @classmethod
    def authors(cls, **changes: Any) -> Config:
        """The paper's method with the choices of the authors' own package where the paper leaves them open: 300 query
        and 1000 K/V groups for every model, the largest groups probed first, the same number of keys for every query
        group, cells scored by mass times value error (docs/decisions/0010-what-the-paper-leaves-open.md).

        Args:
            **changes: Settings that differ from theirs.

        Returns:
            A Config.
        """
        theirs = {
            "query_groups": 300,
            "kv_groups": 1000,
            "probe_order": "largest",
            "score": "value-error",
            "budget_scope": "query-group",
        }
        return cls.paper(**{**theirs, **changes})

    @property
    def skips_nothing(self) -> bool:
        """Whether every pair is evaluated: density 1 without an error bound that could lower it."""
        return self.density == 1.0 and self.max_error is None

    @property
    def takes_probes(self) -> bool:
        """Whether calls compute probe rows: not if nothing is skipped, or nothing is reconstructed."""
        return not self.skips_nothing and RECONSTRUCTION_TRAITS[self.reconstruction].takes_probes

    @property
    def summarises(self) -> bool:
        """Whether skipped groups are summarised by keys that rows attend to."""
        return RECONSTRUCTION_TRAITS[self.reconstruction].all_in

    @property
    def ceiling(self) -> float:
        """The highest density of a head that is not dense."""
        return max(self.density, MAX_BALANCED_DENSITY) if self.balance else self.density

    @property
    def moves_budget(self) -> bool:
        """Whether what a head may spend depends on the errors of earlier calls."""
        return self.max_error is not None or self.balance

    def __post_init__(self) -> None:
        _number(self, "density", above=0.0, maximum=1.0)
        _number(self, "ridge", minimum=0.0, maximum=1e12)
        for name in ("key_rank", "query_rank", "metric_rows", "residual_rank"):
            _integer(self, name, minimum=1)
        for name in ("kmeans_cold", "kmeans_warm"):
            _integer(self, name, minimum=1, maximum=MAX_KMEANS_STEPS)
        _integer(self, "regroup_every", minimum=1)
        for name in ("probes", "drift_rank"):
            if getattr(self, name) is not None:
                _integer(self, name, minimum=0)
        for name in ("query_groups", "kv_groups", "summary_slots"):
            if getattr(self, name) is not None:
                _integer(self, name, minimum=1)
        _choice(self, "partition", tuple(sorted(PARTITIONS)))
        _choice(self, "score", SCORES)
        _choice(self, "metric_spacing", METRIC_SPACINGS)
        _choice(self, "budget_scope", BUDGET_SCOPES)
        _choice(self, "probe_order", PROBE_ORDERS)
        _choice(self, "rules", RULES)
        _choice(self, "reconstruction", tuple(RECONSTRUCTION_TRAITS))
        if self.probe_policy is not None:
            _choice(self, "probe_policy", PROBE_POLICIES)
        for name in ("subspace", "check_finite", "balance"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"Config.{name}={getattr(self, name)!r}: wanted true or false")
        if not isinstance(self.backend, str):
            raise InputError(f"Config.backend={self.backend!r}: wanted a name such as 'auto' or 'torch'")
        if self.summarises and self.score == "value-error":
            raise InputError(
                f"Config.score='value-error' with reconstruction={self.reconstruction!r}: a summary needs "
                "the mass of what is skipped; use score='mass', or reconstruction='probe' or 'none'"
            )
        self._check_estimate()

    def _check_estimate(self) -> None:
        """Moving a budget needs an error estimate from rows that no fit has seen."""
        if self.max_error is not None:
            _number(self, "max_error", above=0.0, maximum=1.0)
        for name, wanted in (("max_error", self.max_error is not None), ("balance", self.balance)):
            if wanted and (not self.summarises or self.probes == 0):
                raise InputError(
                    f"Config.{name} needs an error estimate of every call: use reconstruction='anchored' "
                    f"or 'tail' with probes (given: reconstruction={self.reconstruction!r}, "
                    f"probes={self.probes})"
                )
            if wanted and self.probe_policy in READS_LOW:
                raise InputError(
                    f"Config.{name} with probe_policy={self.probe_policy!r}: rows near the middle of their "
                    "groups make the estimated error read 2 to 4 times too low; leave probe_policy out"
                )

    def replace(self, **changes: Any) -> Config:
        """A copy with some settings changed, checked again.

        Args:
            **changes: New values by name.

        Returns:
            A new Config.
        """
        return Config.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, as plain values.

        Returns:
            A dict that `from_dict` reads.
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Builds a Config from plain values.

        Args:
            settings: Values by name; a name that does not exist is an error, not ignored.

        Returns:
            A Config.
        """
        _refuse_unknown(cls, settings)
        return cls(**settings)

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """Loads settings from a TOML file.

        Args:
            path: The file; if it has a `[residua]` table, only that is read.

        Returns:
            A Config; `InputError` says what is wrong with the file.
        """
        data = read_toml(Path(path), "density = 0.22")
        table = data.get("residua", data)
        if not isinstance(table, dict):
            raise InputError(f"{path}: `residua` is {type(table).__name__}; wanted a table [residua]")
        return cls.from_dict(table)


def _refuse_unknown(kind: Any, settings: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(kind)]
    unknown = sorted(str(name) for name in settings if name not in known)
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise InputError(f"unknown setting {', '.join(unknown)}; Config has: {', '.join(known)}{hint}")


def _number(config: Config, name: str, *, maximum: float, minimum: float = -math.inf, above: float = -math.inf) -> None:
    value = getattr(config, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (minimum <= value <= maximum and value > above):
        low = f"above {above:g}" if above > -math.inf else f"from {minimum:g}"
        percent = number and maximum == 1.0 and 2.0 <= value <= 100.0
        hint = f"; did you mean {value / 100:g}?" if percent else ""
        raise InputError(f"Config.{name}={value!r}: wanted a number {low} to {maximum:g}{hint}")


def _integer(config: Config, name: str, *, minimum: int, maximum: int | None = None) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InputError(f"Config.{name}={value!r}: wanted a whole number of at least {minimum}")
    if maximum is not None and value > maximum:
        raise InputError(f"Config.{name}={value}: wanted at most {maximum}")


def _choice(config: Config, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise InputError(f"Config.{name}={value!r}: wanted one of {', '.join(map(repr, choices))}")

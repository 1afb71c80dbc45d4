"""Finds the cheapest setting that keeps a target: a few generations, one bisection, and a check on other clips.

The search is over the density of the shared budget (`Config(balance=True)`). The error bound of single heads
changes with it as in the named qualities, so that one number sets both how much a run may spend and how far
off a head may be. More density means less error, so the search can halve an interval; where noise breaks that
rule, the result is still a setting that was measured to keep the target.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...config import MAX_BALANCED_DENSITY, Config
from ...errors import InputError
from ...hosts import QUALITIES, Profile, Settings
from ...hosts.diffusers import model_facts
from ...hosts.quality import DEFAULT_QUALITY
from .. import doctor
from ..metrics.video_quality import Lpips
from .averages import ClipSet, MeanRow, sparse_row
from .compare import Watch
from .comparison import Comparison, machine
from .run import Request

TUNING, HELD_OUT = "tuning", "held out"  # the clips for the search, and those for the check
MIN_DENSITY = 0.02
FINE_ENOUGH = 1.12  # the search stops when two densities are this close: they cost nearly the same
GUARDS = (0.03, 0.4)
# In the named qualities max_error x density is near this: .014, .012, .012.
GUARD_TIMES_DENSITY = 0.012


NoiseFloor = dict[str, float]  # metric -> its value between two dense runs


@dataclass(frozen=True)
class Target:
    """What every prompt and seed must keep: a PSNR in dB, an LPIPS, or an error of attention."""

    metric: str  # psnr, lpips or error
    value: float

    def __post_init__(self) -> None:
        maximum = {"psnr": 120.0, "lpips": 1.0, "error": 1.0}[self.metric]
        if not 0 < self.value <= maximum:
            raise InputError(f"--target-{self.metric} {self.value:g}: wanted a number above 0, up to {maximum:g}")

    def kept_by(self, value: float) -> bool:
        return value >= self.value if self.metric == "psnr" else value <= self.value

    def worst(self, values: Sequence[float]) -> float:
        return min(values) if self.metric == "psnr" else max(values)

    def text(self, value: float) -> str:
        return f"{value:.2f} dB" if self.metric == "psnr" else f"{self.metric} {value:.4f}"

    def __str__(self) -> str:
        return f"PSNR ≥ {self.value:g} dB" if self.metric == "psnr" else f"{self.metric} ≤ {self.value:g}"


class Unreachable(InputError):
    """No setting keeps the target; the message names the best one that was found."""


@dataclass(frozen=True)
class Trial:
    """One setting on all prompts and seeds: the worst value of the target's metric, means of the rest."""

    means: MeanRow
    worst: float  # of the target's metric; an infinite PSNR means identical videos
    kept: bool
    cost: float  # of all calls, as a share of dense attention

    @property
    def settings(self) -> Settings:
        assert self.means.settings is not None
        return self.means.settings

    @property
    def config(self) -> Config:
        assert self.settings.config is not None
        return self.settings.config

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the evidence of a profile."""
        own = {name: getattr(self, name) for name in ("worst", "kept", "cost")}
        means = {name: getattr(self.means, name) for name in ("psnr", "ssim", "lpips", "error", "speedup")}
        return {"density": self.config.density, "max_error": self.config.max_error, **own, **means}


@dataclass
class Log:
    """What a search did, even if it failed: trials and floors, by the clips they were measured on."""

    hear: Callable[[str, Trial], None]  # called with every new trial
    trials: dict[str, list[Trial]] = field(default_factory=lambda: {TUNING: [], HELD_OUT: []})
    noise_floors: dict[str, NoiseFloor] = field(default_factory=dict)

    def add(self, where: str, trial: Trial) -> Trial:
        self.trials[where].append(trial)
        self.hear(where, trial)
        return trial


@dataclass(frozen=True)
class Tuned:
    """The result: how the chosen setting did on the tuning clips and on the held-out ones."""

    target: Target
    chosen: Trial
    verified: Trial
    log: Log


def setting(density: float, base: Settings | None = None) -> Settings:
    """The shared budget of that density, with its error bound."""
    low, high = GUARDS
    guard = round(min(high, max(low, GUARD_TIMES_DENSITY / density)), 4)
    config = Config(balance=True, density=round(density, 4), max_error=guard)
    return replace(base or Settings(), config=config)


def densities(tries: int, kept: Callable[[float], bool]) -> Iterator[float]:
    """The densities to try: from the default quality outwards until the limit lies between two of them, then
    halving the gap. `kept` says whether a density that was yielded kept the target; at most `tries` of them.

    >>> list(densities(3, lambda density: density >= 0.1))
    [0.06, 0.12, 0.0849]
    """
    low, high = MIN_DENSITY, MAX_BALANCED_DENSITY
    failed: float | None = None  # the largest that did not keep the target
    good: float | None = None  # the smallest that did
    density = QUALITIES[DEFAULT_QUALITY].density
    for _ in range(tries):
        yield density
        if kept(density):
            good = density
        else:
            failed = density
        if failed is None:
            wanted = max(low, density / 2)
        elif good is None:
            wanted = min(high, density * 2)
        else:
            wanted = math.sqrt(failed * good)
        near = good is not None and failed is not None and good / failed < FINE_ENOUGH
        if near or wanted == density:
            return
        density = round(wanted, 4)


def measure_dense(
    pipe: Any, model: str, requests: Sequence[Request], lpips: Lpips | str, watch: Watch, *, noise_floor: bool
) -> ClipSet:
    """The dense clips of all requests, and how far two dense runs are apart."""
    first = replace(setting(QUALITIES[DEFAULT_QUALITY].density), min_tokens=0)
    return ClipSet.generate(pipe, model, requests, first, lpips, watch, noise_floor=noise_floor)


def worst_noise_floor(clips: ClipSet) -> NoiseFloor:
    """PSNR and LPIPS between two dense runs, the worst over all clips; empty if not measured."""
    noise_floors = [one.noise_floor for one in clips.baselines if one.noise_floor is not None]
    found: NoiseFloor = {}
    for metric, worst in (("psnr", min), ("lpips", max)):
        values = [_distance(one, metric) for one in noise_floors]
        known = [value for value in values if value is not None]
        if known and len(known) == len(clips.baselines):
            found[metric] = worst(known)
    return found


def check_noise_floor(target: Target, noise_floor: float | None) -> None:
    """Refuses a target that a second dense run does not keep, because no sparse run can be expected to."""
    if noise_floor is not None and not target.kept_by(noise_floor):
        raise Unreachable(
            f"{target} cannot be kept by any setting: two dense runs of this model differ by "
            f"{target.text(noise_floor)} (the noise floor); ask for less than that, or for --target-error"
        )


def try_setting(clips: ClipSet, settings: Settings, target: Target) -> Trial:
    """One setting on all clips."""
    assert settings.config is not None
    name = f"density {settings.config.density:g}"
    found = clips.compare(name, settings)
    if found[0].all_dense is not None:
        raise InputError(
            f"{found[0].all_dense}: there is nothing to tune; more frames, a larger size, or --min-tokens 0"
        )
    worst = target.worst([_measured(one, target) for one in found])
    return Trial(sparse_row(name, settings, found), worst, target.kept_by(worst), _total_cost(found))


def tune(
    pipe: Any,
    model: str,
    tuning: Sequence[Request],
    held_out: Sequence[Request],
    target: Target,
    base: Settings,
    *,
    lpips: Lpips | str,
    watch: Watch,
    log: Log,
    tries: int = 7,
    noise_floor: bool = True,
) -> Tuned:
    """Searches on the tuning clips, then checks the cheapest setting that keeps the target on the held-out
    clips. If it fails there, the next more expensive setting that was tried takes its place.

    Args:
        pipe: The pipeline, not accelerated.
        model: Its name.
        tuning: What to generate while searching.
        held_out: What to generate for the check.
        target: What must be kept.
        base: Dense steps and layers and `min_tokens` of every setting; its config is replaced.
        lpips: A network, or the reason why there is none.
        watch: Called with the name of each run.
        log: Keeps what was done.
        tries: The most settings that are tried.
        noise_floor: Whether dense runs twice.

    Returns:
        The result; raises `Unreachable` if nothing keeps the target.
    """

    def dense(where: str, requests: Sequence[Request]) -> ClipSet:
        clips = measure_dense(pipe, model, requests, lpips, watch, noise_floor=noise_floor)
        log.noise_floors[where] = worst_noise_floor(clips)
        return clips

    def trial(where: str, clips: ClipSet, settings: Settings) -> Trial:
        return log.add(where, try_setting(clips, settings, target))

    clips = dense(TUNING, tuning)
    check_noise_floor(target, log.noise_floors[TUNING].get(target.metric))
    found: dict[float, Trial] = {}
    for density in densities(tries, lambda tried: found[tried].kept):
        found[density] = trial(TUNING, clips, setting(density, base))
    kept = sorted((one for one in found.values() if one.kept), key=lambda one: one.cost)
    if not kept:
        raise Unreachable(_missed(target, log))
    others = dense(HELD_OUT, held_out)
    for chosen in kept:
        verified = trial(HELD_OUT, others, chosen.settings)
        if verified.kept:
            return Tuned(target, chosen, verified, log)
    best = _best(target, log.trials[HELD_OUT])
    raise Unreachable(
        f"{target} holds on the tuning clips and not on the held-out ones (best there: "
        f"{target.text(best.worst)}): tune on more prompts or seeds, or ask for less"
    )


def make_profile(pipe: Any, model: str, tuned: Tuned, facts: dict[str, Any]) -> Profile:
    """The chosen setting as a profile, with its evidence."""
    evidence = {
        "target": str(tuned.target),
        "metric": tuned.target.metric,
        "wanted": tuned.target.value,
        "on_tuning": tuned.chosen.worst,
        "on_held_out": tuned.verified.worst,
        "floor": tuned.log.noise_floors.get(TUNING),
        "held_out_floor": tuned.log.noise_floors.get(HELD_OUT),
        **facts,
        "tried": [trial.to_dict() for trial in tuned.log.trials[TUNING]],
        "verified": [trial.to_dict() for trial in tuned.log.trials[HELD_OUT]],
        "versions": {name: number for name, number in doctor.versions().items() if number},
        "machine": machine()["cpu"],
        "gpus": machine()["gpus"],
    }
    return Profile(tuned.chosen.settings, model_facts(pipe, model), evidence)


def _best(target: Target, trials: Sequence[Trial]) -> Trial:
    """The trial that comes nearest to the target."""
    return max(trials, key=lambda one: one.worst if target.metric == "psnr" else -one.worst)


def _missed(target: Target, log: Log) -> str:
    trials, noise_floor = log.trials[TUNING], log.noise_floors[TUNING].get(target.metric)
    best = _best(target, trials)
    known = "" if noise_floor is None else f"; the noise floor is {target.text(noise_floor)}"
    further = max(trial.config.density for trial in trials) < MAX_BALANCED_DENSITY
    way_out = "more --tries, ask for less" if further else "ask for less"
    return (
        f"{target} is not reached by any of {len(trials)} settings; the best is {target.text(best.worst)} at "
        f"density {best.config.density:g}{known}: {way_out}, or stay dense"
    )


def _measured(found: Comparison, target: Target) -> float:
    value = found.report.total.error if target.metric == "error" else _distance(found.quality, target.metric)
    if value is None:
        reason = found.quality.not_measured.get(target.metric, "no call estimated it")
        raise InputError(f"--target-{target.metric}: not measured here ({reason}); choose another target")
    return value


def _distance(quality: Any, metric: str) -> float | None:
    """A metric of two videos; an infinite PSNR if they are identical."""
    value: float | None = getattr(quality, metric)
    if value is None and metric == "psnr" and "identical" in quality.not_measured.get(metric, ""):
        return math.inf
    return value


def _total_cost(found: Sequence[Comparison]) -> float:
    """Cost of the sparse calls and of those that stayed dense, as a share of dense attention."""
    spent = sum(one.attention_flops(dense=False) for one in found)
    return spent / max(1, sum(one.attention_flops(dense=True) for one in found))

"""`residua analyze`: the observations of section 3 over a whole capture, as one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..config import Config
from .captures import CapturedCall
from .diagnostics import PARTITIONS, affine, fidelity, support
from .observations import (
    MASS,
    MEMBERS,
    Observed,
    affine_table,
    call_table,
    fidelity_table,
    findings,
    pictures,
    support_table,
)
from .report import Report
from .study import Study
from .tables import share

DENSITIES = (0.12, 0.22, 0.35)
Watch = Callable[[int, int, str], None]  # calls done, calls in all, what comes now


@torch.no_grad()
def observe(captured: CapturedCall, config: Config, densities: Sequence[float], groups: int) -> Observed:
    study = Study(captured, config)
    return Observed(
        captured,
        {name: support(study, name, MASS, MEMBERS, groups) for name in PARTITIONS},
        [fidelity(study, name, density) for name in PARTITIONS for density in densities],
        {name: affine(study, name) for name in PARTITIONS},
    )


def analyze(
    calls: Sequence[CapturedCall],
    config: Config,
    command: str,
    quick: bool = False,
    watch: Watch | None = None,
) -> Report:
    """Observes every call (a few with `quick`) and writes the report."""
    chosen = few(calls) if quick else list(calls)
    densities = tuple(sorted({config.density} if quick else {*DENSITIES, config.density}))
    found = []
    for place, captured in enumerate(chosen):
        if watch is not None:
            watch(place, len(chosen), f"{captured.model} {captured.name}")
        found.append(observe(captured, config, densities, 16 if quick else 64))
    if watch is not None:
        watch(len(chosen), len(chosen), "done")
    return Report(
        title="Structure of captured attention",
        lead="How many keys a row needs and how many a shared route needs, what the kept mass says about the "
        "error, and how much of the missing part an affine map can restore.",
        command=command,
        tables=[support_table(found), fidelity_table(found), affine_table(found), call_table(found)],
        pictures=pictures(found),
        findings=findings(found),
        facts=facts(chosen, calls, config),
        data={"calls": [item.to_dict() for item in found], "config": config.to_dict()},
    )


def few(calls: Sequence[CapturedCall], most: int = 4) -> list[CapturedCall]:
    """Evenly spaced ones, for a quick look."""
    number = min(most, len(calls))
    return [calls[place * len(calls) // number] for place in range(number)]


def facts(chosen: Sequence[CapturedCall], calls: Sequence[CapturedCall], config: Config) -> dict[str, str]:
    tokens = sorted({call.tokens for call in chosen})
    return {
        "calls": f"{len(chosen)} of {len(calls)} captured, one head each",
        "models": ", ".join(dict.fromkeys(call.model for call in chosen)),
        "tokens": ", ".join(f"{count:,}" for count in tokens),
        "density": f"target {share(config.density)}; probe rows are paid for, used or not",
        "error": "per row, |out - dense| / |dense|",
    }

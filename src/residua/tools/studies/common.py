"""What every study shares: progress, the calls for a quick look, and the footnotes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...config import Config
from ..capture.captures import CapturedCall
from ..reports.page import Finding
from ..reports.table import share

QUICK_CALLS = 4  # for a quick look
MIN_TOKENS = 4096  # calls shorter than this do not confirm or contradict a claim

Watch = Callable[[int, int, str], None]  # calls done, calls in all, name of the next


def watched(calls: Sequence[CapturedCall], watch: Watch | None) -> Iterator[CapturedCall]:
    """Yields the calls in turn; each is announced before it is studied."""
    for place, captured in enumerate(calls):
        if watch is not None:
            watch(place, len(calls), f"{captured.model} {captured.name}")
        yield captured
    if watch is not None:
        watch(len(calls), len(calls), "done")


def few(calls: Sequence[CapturedCall]) -> list[CapturedCall]:
    """A few evenly spaced calls, for a quick look."""
    number = min(QUICK_CALLS, len(calls))
    return [calls[place * len(calls) // number] for place in range(number)]


def weighed(findings: Sequence[Finding], chosen: Sequence[CapturedCall]) -> list[Finding]:
    """The findings without verdicts if the calls are too short: groups of a few rows and budgets of a few
    cells say nothing about a model at its real length."""
    longest = max(call.tokens for call in chosen)
    if longest >= MIN_TOKENS:
        return list(findings)
    instead = "too short to judge"
    evidence = f"calls of {longest:,} tokens; wanted {MIN_TOKENS:,} or more"
    return [
        item if item.any_length else replace(item, instead=instead, evidence=f"{item.evidence} ({evidence})")
        for item in findings
    ]


def facts(chosen: Sequence[CapturedCall], calls: Sequence[CapturedCall], config: Config) -> dict[str, str]:
    """Footnotes: which calls, how long, at which density."""
    tokens = sorted({call.tokens for call in chosen})
    return {
        "calls": f"{len(chosen)} of {len(calls)} captured, one head each",
        "models": ", ".join(dict.fromkeys(call.model for call in chosen)),
        "tokens": ", ".join(f"{count:,}" for count in tokens),
        "density": f"target {share(config.density)}; probe rows are paid for, used or not",
        "error": "per row, |out - dense| / |dense|",
    }

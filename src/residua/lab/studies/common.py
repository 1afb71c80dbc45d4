"""What every study shares: who watches its progress, which calls a quick look takes, and the small print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...config import Config
from ..captures import CapturedCall
from ..tables import share

Watch = Callable[[int, int, str], None]  # calls done, calls in all, what comes now


def watched(calls: Sequence[CapturedCall], watch: Watch | None) -> Iterator[CapturedCall]:
    """The calls in turn, each announced before it is studied."""
    for place, captured in enumerate(calls):
        if watch is not None:
            watch(place, len(calls), f"{captured.model} {captured.name}")
        yield captured
    if watch is not None:
        watch(len(calls), len(calls), "done")


def few(calls: Sequence[CapturedCall], most: int = 4) -> list[CapturedCall]:
    """Evenly spaced ones, for a quick look."""
    number = min(most, len(calls))
    return [calls[place * len(calls) // number] for place in range(number)]


def facts(chosen: Sequence[CapturedCall], calls: Sequence[CapturedCall], config: Config) -> dict[str, str]:
    """Lines of small print: which calls, how long, at which density."""
    tokens = sorted({call.tokens for call in chosen})
    return {
        "calls": f"{len(chosen)} of {len(calls)} captured, one head each",
        "models": ", ".join(dict.fromkeys(call.model for call in chosen)),
        "tokens": ", ".join(f"{count:,}" for count in tokens),
        "density": f"target {share(config.density)}; probe rows are paid for, used or not",
        "error": "per row, |out - dense| / |dense|",
    }

"""How close a sparse video stays to the dense one, in words: each a bound of the error under a ceiling."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config
from ..errors import InputError


@dataclass(frozen=True)
class Quality:
    """A head may be off by `max_error` at most and spend `density` of dense attention at most; one that
    cannot keep both runs dense."""

    name: str
    max_error: float
    density: float
    meaning: str

    def config(self) -> Config:
        return Config(max_error=self.max_error, density=self.density)


QUALITIES = {
    quality.name: quality
    for quality in (
        Quality("faithful", 0.03, 0.30, "as close as it gets without being dense"),
        Quality("balanced", 0.06, 0.16, "small errors, most of the saving"),
        Quality("fast", 0.12, 0.10, "saves the most; look at the result before you trust it"),
    )
}


def find_quality(name: object) -> Quality:
    """The quality of that name; InputError lists the names there are."""
    if not isinstance(name, str) or name not in QUALITIES:
        raise InputError(f"quality={name!r}: wanted one of {', '.join(map(repr, QUALITIES))}")
    return QUALITIES[name]

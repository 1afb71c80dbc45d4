"""The named qualities: each is a budget with an error bound for single heads."""

from dataclasses import dataclass

from ..config import Config
from ..errors import InputError


@dataclass(frozen=True)
class Quality:
    """A budget that all heads of a run share, and a bound on the error of each: a head above the bound may
    spend more than its part, and runs dense if that is not enough.

    Args:
        name: Its name.
        density: What a run may cost, as a share of dense attention.
        max_error: The bound on the estimated error of every head.
        meaning: What to expect from it.
    """

    name: str
    density: float
    max_error: float
    meaning: str

    def config(self) -> Config:
        """The settings that the name stands for."""
        return Config(density=self.density, balance=True, max_error=self.max_error)


QUALITIES = {
    quality.name: quality
    for quality in (
        Quality("faithful", 0.14, 0.1, "as close as it gets without being dense"),
        Quality("balanced", 0.06, 0.2, "small errors, most of the saving"),
        Quality("fast", 0.04, 0.3, "saves the most; look at the result before you trust it"),
    )
}
DEFAULT_QUALITY = "balanced"


def find_quality(name: object) -> Quality:
    """The quality of that name; InputError lists the names there are."""
    if not isinstance(name, str) or name not in QUALITIES:
        raise InputError(f"quality={name!r}: wanted one of {', '.join(map(repr, QUALITIES))}")
    return QUALITIES[name]

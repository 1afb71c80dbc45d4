"""What the steps of a run may spend: more where more noise is removed.

A step moves the video by the noise that it removes, and an error of the model enters the result in that
proportion. With errors that fall as 1 / density, the sum of what all steps add is least if densities go
with the root of it (docs/decisions/0022-budgets-of-steps.md).
"""

import math
from collections.abc import Sequence

POWER = 0.5  # of the noise that a step removes
# Limits of a share: how much the errors of other steps matter is only known roughly.
MIN_SHARE, MAX_SHARE = 0.5, 2.0
# Shares lie on a ladder of so many rungs for each doubling: group counts follow the density, and tokens keep
# their groups while these stay the same.
RUNGS = 4


def shares_of_steps(removed: Sequence[float]) -> tuple[float, ...]:
    """What every step of a run may spend, relative to the mean over the steps.

    Args:
        removed: The noise that each step removes, in any unit.

    Returns:
        One share for each step, with a mean of 1; all 1 if a step removes nothing, because it is then not
        known what its errors do.
    """
    if not all(math.isfinite(noise) and noise > 0 for noise in removed):
        return (1.0,) * len(removed)
    wanted = _mean_of_one([noise**POWER for noise in removed])
    rungs = [round(RUNGS * math.log2(min(MAX_SHARE, max(MIN_SHARE, share)))) for share in wanted]
    return tuple(_mean_of_one([2 ** (rung / RUNGS) for rung in rungs]))


def _mean_of_one(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / max(1, len(values))
    return [value / mean for value in values]

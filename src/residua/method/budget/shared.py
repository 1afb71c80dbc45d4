"""One budget for many heads: pairs go where they reduce the error most (water filling).

The error of a head is modelled as `scale * density ** -power`, both learned from the errors that its calls
estimate. Its effect on the output is the error times the norm of the head's output. Minimising the sum of
these absolute errors under a fixed total gives every head the density at which one more pair would reduce the
sum as much as in any other head; this common rate is found by search.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...config import MAX_BALANCED_DENSITY
from .bounded import TINY, finite_error

POWER = 1.0  # of the error's fall, until a head was seen at two densities
POWERS = (0.4, 3.0)  # range of plausible powers; a measured one outside is noise
MIN_MOVE = 0.15  # smallest change of log density from which a power can be measured
SMOOTHING = 0.5  # weight of the older estimate
# The interval that holds the common rate is cut into so many sections, so many times: 2 ** 42 in all, in few
# launches on a GPU.
SECTIONS, CUTS = 64, 7


@dataclass(frozen=True)
class HeadModel:
    """What is known about the heads of one layer: error ~ scale * density ** -power."""

    log_scale: Tensor  # [B, H] fp64
    power: Tensor  # [B, H] fp64
    norm: Tensor  # [B, H] fp64, mean norm of the head's output rows
    minimum: Tensor  # [B, H] fp64, the density below which a reconstruction does not work
    density: Tensor  # [B, H] fp64, at the last call
    log_error: Tensor  # [B, H] fp64, the error at that density
    pairs: float  # of one head, dense
    mean: float  # density over all heads, at the last call

    def updated(self, density: Tensor, log_error: Tensor, norm: Tensor, minimum: Tensor, mean: float) -> HeadModel:
        """The model after one more call. A power is measured where a head has moved against the others: what
        all have gained or lost from step to step says as much about the steps."""
        together = math.log(mean / self.mean)
        moved = density.log() - self.density.log() - together
        fallen = self.log_error - log_error - self.power * together
        measured = fallen / torch.where(moved.abs() > MIN_MOVE, moved, 1.0)
        power = torch.where(moved.abs() > MIN_MOVE, measured.clamp(*POWERS), self.power)
        power = SMOOTHING * self.power + (1 - SMOOTHING) * power
        now = log_error + power * density.log()
        before = self.log_error + power * self.density.log()
        return replace(
            self,
            log_scale=SMOOTHING * before + (1 - SMOOTHING) * now,
            power=power,
            norm=norm,
            minimum=minimum,
            density=density,
            log_error=log_error,
            mean=mean,
        )


class SharedBudget:
    """A budget that the heads of all layers and branches of a run share, from step to step.

    Until a layer has been seen its heads get the mean density. From then on the allowances of all known
    layers are solved together, once per step: when the first layer of the new step asks again.

    Not safe to share between threads that call at the same time. Never waits for the device.
    """

    def __init__(self) -> None:
        self._models: dict[Hashable, HeadModel] = {}
        self._allowed: dict[Hashable, Tensor] = {}

    def reset(self) -> None:
        """Forgets everything: a new run begins."""
        self._models.clear()
        self._allowed.clear()

    def allowance(
        self, owner: Hashable, mean: float, max_error: float | None, minimum: Tensor | None = None
    ) -> Tensor | None:
        """What the heads of a layer may spend in the coming call.

        Args:
            owner: Any key that identifies the layer and guidance branch.
            mean: The density to spend on average over all heads.
            max_error: A bound on each head's error that may cost more than the budget; None: no bound.
            minimum: [B, H] fp64, the least useful density of the coming call; None: that of the last one. Sizes
                follow the budget, and a budget that differs from step to step moves it.

        Returns:
            [B, H] fp64, or None if the layer was not seen yet.
        """
        if owner not in self._models:
            return None
        if owner not in self._allowed:
            moved = None if minimum is None else minimum.mean() / self._models[owner].minimum.mean().clamp(min=TINY)
            self._allowed = self._solve(mean, max_error, moved)
        allowed = self._allowed.pop(owner)
        return allowed if minimum is None else allowed.maximum(minimum)

    def learn(
        self, owner: Hashable, density: Tensor, error: Tensor, norm: Tensor, minimum: Tensor, pairs: float, mean: float
    ) -> None:
        """Learns from a finished call; owner, minimum and mean as in `allowance`.

        density [B, H], what its heads were allowed to spend; error [B, H], their estimated relative errors;
        norm [B, H], the mean norms of their output rows; pairs, those of one head, dense
        """
        log_error = finite_error(error).clamp(min=TINY).log()
        norm, minimum = norm.double(), minimum.expand_as(density)
        known = self._models.get(owner)
        if known is None or known.density.shape != density.shape or known.density.device != density.device:
            power = torch.full_like(density, POWER)
            log_scale = log_error + power * density.log()
            self._models[owner] = HeadModel(log_scale, power, norm, minimum, density, log_error, pairs, mean)
        else:
            self._models[owner] = known.updated(density, log_error, norm, minimum, mean)

    def _solve(self, mean: float, max_error: float | None, moved: Tensor | None) -> dict[Hashable, Tensor]:
        """The allowances of all layers. What has moved the minimum of one has moved that of the others, because
        they are alike."""
        models = list(self._models.values())
        home = models[0].density.device  # the layers of a large model may be on several GPUs

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(model, name).to(home).flatten() for model in models])

        share = torch.cat([torch.full_like(m.density, m.pairs, device=home).flatten() for m in models])
        share = share / share.sum()  # a head's share of all pairs
        minimum = joined("minimum") if moved is None else joined("minimum") * moved.to(home)
        density = fill(joined("log_scale"), joined("power"), joined("norm"), minimum.clamp(max=mean), share, mean)
        if max_error is not None:
            log_needed = (joined("log_scale") - math.log(max_error)) / joined("power")
            density = density.maximum(log_needed.exp().clamp(max=MAX_BALANCED_DENSITY))
        parts = density.split([model.density.numel() for model in models])
        return {
            owner: part.view_as(model.density).to(model.density.device)
            for (owner, model), part in zip(self._models.items(), parts, strict=True)
        }


def fill(log_scale: Tensor, power: Tensor, norm: Tensor, minimum: Tensor, share: Tensor, mean: float) -> Tensor:
    """The densities that minimise the sum of `norm * scale * density ** -power`, from `minimum` to
    MAX_BALANCED_DENSITY. By `share`, a head's share of all pairs, their mean is `mean` unless these bounds forbid it.

    log_scale, power, norm, minimum and share (which sums to 1): [n] fp64 -> [n] fp64
    """
    # at the optimum  norm * power * scale * density ** -(power + 1) = share * rate
    log_gain = norm.clamp(min=TINY).log() + power.log() + log_scale - share.clamp(min=TINY).log()

    def at(log_rate: Tensor) -> Tensor:
        wanted = ((log_gain - log_rate) / (power + 1)).exp()
        return wanted.clamp(max=max(mean, MAX_BALANCED_DENSITY)).maximum(minimum)

    low, high = log_gain.amin() - 20.0, log_gain.amax() + 60.0
    places = torch.linspace(0, 1, SECTIONS + 1, dtype=low.dtype, device=low.device)
    for _ in range(CUTS):
        rates = low + (high - low) * places  # [SECTIONS + 1]
        over = (share * at(rates.unsqueeze(-1))).sum(-1) > mean  # density falls as the rate rises
        low, high = torch.where(over, rates, low).amax(), torch.where(over, high, rates).amin()
    return at(high)

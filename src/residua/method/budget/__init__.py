"""What each head of a call may spend: a fixed share of dense attention, as much as an error bound needs, or
its part of a budget that many heads share.

A fixed density pays for everything, text tokens included; where these take more than half of it, half of it
is left for the rest. Budgets that move are for what can be skipped: what exact rows and pinned keys take
comes on top, because no head could do without it. In the paper's method text pays like any other pair.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...receipt import Note
from ...state import State
from ...types import Probes
from ..reconstructions import RECONSTRUCTIONS, Reconstruction
from ..sizes import of_skippable, of_whole_call, with_text
from ..stages import SizedCall, Verdict
from . import bounded
from .shared import SharedBudget
from .steps import shares_of_steps

__all__ = ["Budget", "SharedBudget", "decide", "learn", "shares_of_steps"]


@dataclass(frozen=True)
class Budget:
    """What the heads of a call may spend, and the reconstruction that this pays for."""

    method: Reconstruction
    allowed: Tensor  # [B, H] fp64, the density that each head may spend
    minimum: Tensor | None  # [B, H] fp64, the least density of use to a head; None if budgets do not move
    notes: tuple[Note, ...]  # for the receipt, if the reconstruction is another than the config's


def decide(sized: SizedCall, state: State | None) -> Budget:
    """A fixed budget, or what the errors of earlier calls say if budgets move and the state has seen any."""
    call, config = sized.call, sized.config
    method, notes = RECONSTRUCTIONS[config.reconstruction].affordable(sized)
    density = torch.full(call.q.shape[:2], config.density, dtype=torch.float64, device=call.q.device)
    if not config.moves_budget:
        return Budget(method, with_text(call, density) if config.summarises else density, None, notes)
    minimum = _minimum(sized, method, density)
    if state is not None and state.knows_budget(call, config):
        learned = state.budget
        if config.balance:
            learned = _shared(state).allowance(state, config.density, config.max_error, minimum)
        density = density if learned is None else learned
    return Budget(method, of_whole_call(call, density), minimum, notes)


def learn(sized: SizedCall, budget: Budget, verdict: Verdict, state: State) -> None:
    """Remembers what the next call of this layer may spend, if budgets depend on earlier calls."""
    call, config = sized.call, sized.config
    error = verdict.sparse_error  # of dense heads too: whether they stay dense depends on it
    if error is None or budget.minimum is None:
        return
    spent, learned = of_skippable(call, budget.allowed), None
    if config.balance:
        pairs, norm = float(call.q.shape[2] * call.k.shape[2]), _output_norm(verdict.probes)
        _shared(state).learn(state, spent, error, norm, budget.minimum, pairs, config.density)
    else:
        assert config.max_error is not None
        learned = bounded.next_budget(spent, error, budget.minimum, ceiling=config.density, bound=config.max_error)
    state.remember_budget(call, config, learned)


def _shared(state: State) -> SharedBudget:
    """The budget that the heads of a layer share with each other, and maybe with other layers."""
    if state.shared is None:
        state.shared = SharedBudget()
    return state.shared


def _minimum(sized: SizedCall, method: Reconstruction, density: Tensor) -> Tensor:
    """The least density that is of use to the heads of this call, at most the mean.  # [B, H] fp64"""
    minimum, mean = method.min_density(sized), sized.config.density
    if isinstance(minimum, Tensor):
        return minimum.clamp(max=mean).expand_as(density)
    return torch.full_like(density, min(minimum, mean))


def _output_norm(probes: Probes | None) -> Tensor:
    """Mean norm of a head's output rows, measured on the exact ones.  # [B, H]"""
    assert probes is not None, "an error estimate comes from probes"
    norm = torch.nan_to_num(probes.exact.norm(dim=-1), nan=0.0, posinf=0.0)  # [B, H, M]
    total = probes.weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (norm * probes.weights).sum(-1) / total

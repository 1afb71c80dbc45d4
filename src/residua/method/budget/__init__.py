"""What each head of a call may spend: a fixed share of dense attention, as much as an error bound needs, or
its part of a budget that many heads share.

A fixed density pays for everything, text tokens included; where these take more than half of it, half of it
is left for the rest. Budgets that move are for what can be skipped: what exact rows and pinned keys take
comes on top, because no head could do without it. In the paper's method text pays like any other pair.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...config import Config
from ...state import State
from ...types import Call, Probes
from ..reconstruction import Reconstruction
from ..stages import GroupedCall, Verdict
from ..text import beside_held, with_text, without_held
from . import bounded
from .shared import SharedBudget
from .steps import shares_of_steps

__all__ = ["SharedBudget", "allowance", "learn", "moved", "shares_of_steps"]


def allowance(call: Call, config: Config) -> Tensor:
    """The density that each head may spend in a call of which nothing is known.  # [B, H] fp64"""
    density = torch.full(call.q.shape[:2], config.density, dtype=torch.float64, device=call.q.device)
    if config.moves_budget:
        return beside_held(call, density)
    return with_text(call, density) if config.summarises else density


def moved(grouped: GroupedCall, method: Reconstruction, state: State | None) -> GroupedCall:
    """The call with what its heads may spend by the errors of earlier calls, if budgets move."""
    call, config = grouped.call, grouped.config
    if state is None or not config.moves_budget or not state.knows_budget(call, config):
        return grouped
    learned, floor = state.budget, None
    if config.balance:
        floor = _floor(grouped, method)
        learned = _shared(state).allowance(state, config.density, config.max_error, floor)
    return grouped if learned is None else replace(grouped, allowed=beside_held(call, learned), floor=floor)


def learn(state: State, grouped: GroupedCall, verdict: Verdict, method: Reconstruction) -> None:
    """Remembers what the next call of this layer may spend, if budgets depend on earlier calls."""
    call, config = grouped.call, grouped.config
    error = verdict.sparse_error  # of dense heads too: whether they stay dense depends on it
    if error is None or not config.moves_budget:
        return
    spent = without_held(call, grouped.allowed)
    floor = _floor(grouped, method) if grouped.floor is None else grouped.floor
    budget = None
    if config.balance:
        pairs = float(call.q.shape[2] * call.k.shape[2])
        _shared(state).learn(state, spent, error, _output_norm(verdict.probes), floor, pairs, config.density)
    else:
        assert config.max_error is not None
        budget = bounded.next_budget(spent, error, floor, ceiling=config.density, bound=config.max_error)
    state.remember_budget(call, config, budget)


def _shared(state: State) -> SharedBudget:
    """The budget that the heads of a layer share with each other, and maybe with other layers."""
    if state.shared is None:
        state.shared = SharedBudget()
    return state.shared


def _floor(grouped: GroupedCall, method: Reconstruction) -> Tensor:
    """The least density that is of use to the heads of this call, at most the mean.  # [B, H] fp64"""
    least, most = method.min_density(grouped), grouped.config.density
    if isinstance(least, Tensor):
        return least.clamp(max=most).expand_as(grouped.allowed)
    return torch.full_like(grouped.allowed, min(least, most))


def _output_norm(probes: Probes | None) -> Tensor:
    """Mean norm of a head's output rows, measured on the exact ones.  # [B, H]"""
    assert probes is not None, "an error estimate comes from probes"
    norm = torch.nan_to_num(probes.exact.norm(dim=-1), nan=0.0, posinf=0.0)  # [B, H, M]
    total = probes.weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (norm * probes.weights).sum(-1) / total

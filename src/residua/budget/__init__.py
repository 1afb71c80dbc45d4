"""What each head of a call may spend: a fixed share of dense attention, or what the errors of earlier calls
ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import Config
from ..reconstruction import Choice, GroupedCall, Reconstruction, Verdict
from ..state import State
from ..types import Call
from . import balanced, bounded

__all__ = ["allowance", "learn"]


def allowance(call: Call, config: Config, state: State | None) -> Tensor:
    """The density that each head may spend in this call.  # [B, H] fp64"""
    learned = state.budget(call, config) if state is not None else None
    if learned is not None:
        return learned
    return torch.full(call.q.shape[:2], config.density, dtype=torch.float64, device=call.q.device)


def learn(state: State, grouped: GroupedCall, verdict: Verdict, method: Reconstruction) -> None:
    """Remembers what the next call of this layer may spend, if the config moves budgets at all."""
    config = grouped.config
    if verdict.error is None or verdict.choice is None or not config.moves_budget:
        return
    error = verdict.error
    floor = method.min_density(grouped).clamp(max=config.density)
    if config.max_error is not None:
        dense = verdict.choice == Choice.DENSE
        budget = bounded.next_budget(
            grouped.allowed, error, dense, floor, ceiling=config.density, bound=config.max_error
        )
    else:
        budget = balanced.next_budget(grouped.allowed, error, floor, mean=config.density)
    state.set_budget(grouped.call, config, budget)

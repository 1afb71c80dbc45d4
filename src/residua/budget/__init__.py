"""What each head of a call may spend: a fixed share of dense attention, as much as an error bound needs, or
its part of a budget that many heads share.

A fixed density pays for everything, text tokens included; where these take more than half of it, half of it
is left for the rest. Budgets that move are for what can be skipped: what exact rows and pinned keys take
comes on top, because no head could do without it. In the paper's method text pays like any other pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import Config
from ..held import beside_held, with_text, without_held
from ..reconstruction import GroupedCall, Reconstruction, Verdict
from ..state import State
from ..types import Call, Probes
from . import bounded
from .shared import SharedBudget

__all__ = ["SharedBudget", "allowance", "learn"]


def allowance(call: Call, config: Config, state: State | None) -> Tensor:
    """The density that each head may spend in this call.  # [B, H] fp64"""
    learned = None
    if state is not None and config.moves_budget and state.knows_budget(call, config):
        if config.balance:
            learned = state.shared.allowance(state, config.density, config.max_error)
        else:
            learned = state.budget
    if learned is None:
        learned = torch.full(call.q.shape[:2], config.density, dtype=torch.float64, device=call.q.device)
    if config.moves_budget:
        return beside_held(call, learned)
    return with_text(call, learned) if config.summarises else learned


def learn(state: State, grouped: GroupedCall, verdict: Verdict, method: Reconstruction) -> None:
    """Remembers what the next call of this layer may spend, if budgets depend on earlier calls."""
    call, config = grouped.call, grouped.config
    error = verdict.sparse_error  # of dense heads too: whether they stay dense depends on it
    if error is None or not config.moves_budget:
        return
    spent = without_held(call, grouped.allowed)
    floor = method.min_density(grouped).clamp(max=config.density)
    budget = None
    if config.balance:
        pairs = float(call.q.shape[2] * call.k.shape[2])
        state.shared.learn(state, spent, error, _output_norm(verdict.probes), floor, pairs)
    else:
        assert config.max_error is not None
        budget = bounded.next_budget(spent, error, floor, ceiling=config.density, bound=config.max_error)
    state.remember_budget(call, config, budget)


def _output_norm(probes: Probes | None) -> Tensor:
    """Mean norm of a head's output rows, measured on the exact ones.  # [B, H]"""
    assert probes is not None, "an error estimate comes from probes"
    norm = torch.nan_to_num(probes.exact.norm(dim=-1), nan=0.0, posinf=0.0)  # [B, H, M]
    total = probes.weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (norm * probes.weights).sum(-1) / total

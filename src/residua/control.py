"""How much each head may spend: a fixed share, or what the errors of the calls before ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import Config
from .repair import Plan, Work
from .state import State
from .types import Call

POWER = 1.5  # error falls about with this power of the budget
SHARE = 1 / 4  # a head whose error at the ceiling is 1 / 16 of the bound gets half of the ceiling
GAIN = 0.5  # of moving a balanced budget
STEP = 1.6  # most that a budget grows or shrinks by from one call to the next
PASSES = 4  # of clipping and rescaling a balanced budget
TINY = 1e-12


def aim(call: Call, config: Config, state: State | None) -> Tensor:
    """The density that each head may spend in this call.  # [B, H] fp64"""
    learned = state.budget(call, config) if state is not None else None
    if learned is not None:
        return learned
    return torch.full(call.q.shape[:2], config.density, dtype=torch.float64, device=call.q.device)


def learn(state: State, work: Work, plan: Plan, least: float | Tensor) -> None:
    """Remembers what the next call of this site may spend."""
    config = work.config
    if plan.error is None or plan.choice is None or (config.max_error is None and not config.balance):
        return
    dense = plan.choice == plan.choices.index("dense")
    least = torch.as_tensor(least, dtype=torch.float64, device=dense.device)
    state.set_budget(work.call, config, next_budget(config, work.density, plan.error, dense, least))


def next_budget(config: Config, spent: Tensor, error: Tensor, dense: Tensor, least: Tensor) -> Tensor:
    """What the next call may spend; at least `least`, below which the repair has nothing left to work with.
    spent, error, dense [B, H]; heads that had to run dense keep the ceiling."""
    error = torch.nan_to_num(error.double(), nan=1.0, posinf=1.0)
    least = least.clamp(max=config.density)
    if config.max_error is not None:
        # not what just keeps the bound: an easy head would be made as bad as the worst one may be
        at_ceiling = error * (spent / config.density).pow(POWER)
        wanted = config.density * (at_ceiling / config.max_error).clamp(TINY, 1.0).pow(SHARE)
        wanted = torch.minimum(torch.maximum(wanted, spent / STEP), spent * STEP)
        return torch.where(dense, config.density, torch.maximum(wanted, least).clamp(max=config.density))
    relative = error / error.mean(-1, keepdim=True).clamp(min=TINY)
    wanted = spent * relative.clamp(min=TINY).pow(GAIN).clamp(1 / STEP, STEP)
    return share_out(wanted, config.density, least)


def share_out(wanted: Tensor, mean: float, least: Tensor) -> Tensor:
    """The same proportions with that mean over the heads, within [`least`, 1].  # [B, H]"""
    for _ in range(PASSES):
        wanted = (wanted * (mean / wanted.mean(-1, keepdim=True))).clamp(max=1.0).maximum(least)
    over = wanted.mean(-1, keepdim=True) / mean
    return wanted / over.clamp(min=1.0)  # never more in all than was given

"""One attention call, from top to bottom: each line is a stage, each result is what the next one needs."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from . import control
from .accounting import Receipt, write_receipt
from .clock import Clock
from .config import Config
from .execution.backend import Backend, Demand, select
from .grouping.partition import group_tokens
from .inputs import Spans, judge, refuse_settings, refuse_unsupported
from .repair import REPAIRS, Work
from .sizing import resolve
from .state import State
from .types import Call


def sparse_attention(
    call: Call, config: Config, state: State | None, backend: Backend, clock: Clock
) -> tuple[Tensor, dict[str, object]]:
    """The pipeline. Returns the output [B, H, Nq, Dv] and what the receipt needs to know."""
    sizes = resolve(config, call)
    repair = REPAIRS[config.repair]
    start = state.centroids(call, config, sizes) if state else None
    with clock.stage("grouping"):
        grouping = group_tokens(call, config, sizes, start, backend)
    work = Work(call, config, sizes, grouping, control.aim(call, config, state), backend, clock)
    plan = repair.plan(work)
    with clock.stage("attention"):
        out, _ = backend.attend(
            call.q, call.k, call.v, plan.route, call.scale, plan.tail, repair.working_dtype(work)
        )
    with clock.stage("repair"):
        out, error = repair.finish(work, plan, out)
    with clock.stage("exact rows"):
        _fill_exact(out, call, backend)
    if state:
        state.remember(call, config, sizes, grouping)
        control.learn(state, work, plan, repair.least_density(work))
    facts = {
        "plan": plan,
        "allowed": work.density,
        "error": error,
        "warm": start is not None,
        "notes": sizes.notes,
    }
    return out, facts


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, config: Config | None = ..., state: State | None = ..., *,
    pinned_keys: Spans = ..., exact_queries: Spans = ..., key_mask: Tensor | None = ...,
    scale: float | None = ..., return_receipt: Literal[False] = ..., profile: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, config: Config | None = ..., state: State | None = ..., *,
    pinned_keys: Spans = ..., exact_queries: Spans = ..., key_mask: Tensor | None = ...,
    scale: float | None = ..., return_receipt: Literal[True], profile: bool = ...,
) -> tuple[Tensor, Receipt]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: Config | None = None,
    state: State | None = None,
    *,
    pinned_keys: Spans = None,
    exact_queries: Spans = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    return_receipt: bool = False,
    profile: bool = False,
    **unsupported: object,
) -> Tensor | tuple[Tensor, Receipt]:
    """Sparse attention of q [B, H, Nq, D] over k [B, Hkv, Nk, D] and v [B, Hkv, Nk, Dv].

    `state` warms the grouping from one denoising step to the next. `pinned_keys` are kept for every query
    and `exact_queries` are computed against every key (text tokens), both as (start, stop) or a list of
    such; `key_mask` [B, Nk] is False at padding. `profile` adds the time of every stage to the receipt.

    >>> out, receipt = residua.attention(q, k, v, residua.Config(density=0.22), return_receipt=True)
    """
    refuse_unsupported(unsupported)
    refuse_settings(config, state)
    config = config or Config()
    call = judge(
        q, k, v, scale=scale, pinned_keys=pinned_keys, exact_queries=exact_queries, key_mask=key_mask,
        check_finite=config.check_finite,
    )  # fmt: skip
    backend = select(config.backend, Demand.of(call))
    clock = Clock(profile, q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False), backend.session():
        if call.routable:
            out, facts = sparse_attention(call, config, state, backend, clock)
        else:
            out, facts = exact_attention(call, backend), {}
    if not return_receipt:
        return out
    return out, write_receipt(call, config, backend.name, clock.timings, **facts)  # type: ignore[arg-type]


def exact_attention(call: Call, backend: Backend) -> Tensor:
    """Every row against every key: for calls in which nothing is left to route."""
    out = torch.zeros(*call.q.shape[:3], call.v.shape[-1], dtype=call.q.dtype, device=call.q.device)
    if out.numel() and call.k.shape[2]:
        out.copy_(backend.attend_rows(call.q, call.k, call.v, call.key_mask, call.scale))
    return out


def _fill_exact(out: Tensor, call: Call, backend: Backend) -> None:
    for first, last in call.exact_queries.ranges:
        rows = call.q[:, :, first:last]
        out[:, :, first:last] = backend.attend_rows(rows, call.k, call.v, call.key_mask, call.scale).to(
            out.dtype
        )

"""One attention call, from top to bottom: each line is a stage, each result is what the next one needs."""

from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from .config import Config
from .errors import InputError
from .method import budget as budgets
from .method.grouping.reuse import group_again, keep
from .method.inputs import Spans, key_padding, refuse_settings, refuse_unsupported, rescale, restore, validate
from .method.stages import SizedCall
from .ops.backend import Backend, Demand
from .ops.check import check_route, check_summary
from .ops.matrices import inference, wait_for
from .ops.select import choose_backend
from .receipt import Receipt
from .state import State
from .types import Call, Route, SummaryKeys
from .util.stopwatch import Stopwatch


def sparse_attention(
    sized: SizedCall, state: State | None, stopwatch: Stopwatch, wants_receipt: bool
) -> tuple[Tensor, Receipt | None]:
    """Runs the stages: returns the output [B, H, Nq, Dv], and a receipt if one is wanted."""
    call, config, backend, stage = sized.call, sized.config, sized.backend, stopwatch.stage
    with stage("budget"):
        budget = budgets.decide(sized, state)
        method = budget.method
    with stage("grouping"):
        memory = state.memory(call, config) if state else None
        grouping = group_again(sized, memory, keep_coordinates=method.places_probes_by_coordinates(config))
        grouped = sized.grouped(grouping, budget.allowed)
    with stage("routing"):
        routing = method.route(grouped)
    with stage("summary"):
        summary = method.summarise(grouped, routing)
    with stage("probes"):
        verdict = method.judge(grouped, routing, summary)
    with stage("attention"):
        out_dtype = method.output_dtype(grouped)
        out, _ = backend.attend(call.q, call.k, call.v, verdict.route, call.scale, verdict.summary, out_dtype)
        backend.release()
    with stage("reconstruction"):
        out, error = method.finish(grouped, verdict, out)
    with stage("exact rows"):
        fill_exact(out, call, backend)
    if state:
        state.remember(call, config, keep(sized, grouping))
        budgets.learn(sized, budget, verdict, state)
    if not wants_receipt:
        return out, None
    return out, Receipt.of(
        call,
        config,
        backend.name,
        stopwatch.timings,
        verdict.route,
        allowed=budget.allowed,
        beside={**method.costs(grouped, routing), **verdict.costs()},
        probe_rows=verdict.probes.rows if verdict.probes else None,
        error_per_head=error,
        choice_per_head=verdict.choice,
        reused_per_head=grouping.reused,
        warm=memory is not None and not memory.borrowed,
        clamps=(*sized.sizes.notes, *budget.notes),
    )


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: Config | None = ...,
    state: State | None = ...,
    *,
    pinned_keys: Spans = ...,
    exact_queries: Spans = ...,
    key_mask: Tensor | None = ...,
    scale: float | None = ...,
    return_receipt: Literal[False] = ...,
    time_stages: bool = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: Config | None = ...,
    state: State | None = ...,
    *,
    pinned_keys: Spans = ...,
    exact_queries: Spans = ...,
    key_mask: Tensor | None = ...,
    scale: float | None = ...,
    return_receipt: Literal[True],
    time_stages: bool = ...,
) -> tuple[Tensor, Receipt]: ...
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
    time_stages: bool = False,
    **unsupported: object,
) -> Tensor | tuple[Tensor, Receipt]:
    """Sparse attention of q over k and v.

    Args:
        q: [B, H, Nq, D] in fp32, bf16, fp16 or fp64; any strides.
        k: [B, Hkv, Nk, D]; H is a multiple of Hkv.
        v: [B, Hkv, Nk, Dv].
        config: How the call is approximated; None: `Config()`.
        state: Carries groups and learned budgets from one denoising step to the next; None: start cold.
        pinned_keys: Keys that every query keeps (text tokens), as (start, stop) or a list of such.
        exact_queries: Query rows that are computed against every key, in the same form.
        key_mask: [B, Nk] bool, False at padding.
        scale: Factor of the scores; None: 1 / sqrt(D).
        return_receipt: Whether to return what the call did as well.
        time_stages: Whether the receipt holds the time of every stage.

    Returns:
        The output [B, H, Nq, Dv] in q's dtype; with `return_receipt` a tuple of it and a `Receipt`.

    >>> out, receipt = residua.attention(q, k, v, residua.Config(density=0.22), return_receipt=True)
    """
    refuse_unsupported(unsupported)
    refuse_settings(config, state)
    config = config or Config()
    call = validate(
        q,
        k,
        v,
        scale=scale,
        pinned_keys=pinned_keys,
        exact_queries=exact_queries,
        key_mask=key_mask,
        check_finite=config.check_finite,
    )
    chosen = choose_backend(config.backend, Demand.of(call))
    stopwatch = Stopwatch(time_stages, partial(wait_for, q.device))
    with inference(q.device), chosen.session() as backend:
        sized, power = rescale(SizedCall.of(call, config, backend))
        if call.routable:
            out, receipt = sparse_attention(sized, state, stopwatch, return_receipt)
        else:
            out, receipt = exact_attention(sized.call, backend), None
        out = restore(out, sized, power)
    if not return_receipt:
        return out
    return out, receipt or Receipt.of(sized.call, config, backend.name, stopwatch.timings)


def exact_attention(call: Call, backend: Backend) -> Tensor:
    """Every row against every key, for calls that have nothing to route."""
    out = torch.zeros(*call.q.shape[:3], call.v.shape[-1], dtype=call.q.dtype, device=call.q.device)
    if out.numel() and call.k.shape[2]:
        out.copy_(backend.attend_rows(call.q, call.k, call.v, call.key_mask, call.scale))
    return out


def fill_exact(out: Tensor, call: Call, backend: Backend) -> None:
    """Computes the exact rows of an output [B, H, Nq, Dv], in place."""
    for first, last in call.exact_queries.ranges:
        rows = call.q[:, :, first:last]
        out[:, :, first:last] = backend.attend_rows(rows, call.k, call.v, call.key_mask, call.scale).to(out.dtype)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: Config | None = None,
    state: State | None = None,
) -> Tensor:
    """Sparse attention for code that calls torch's function; raises for arguments that it does not support.

    Args:
        query: [B, H, Nq, D].
        key: [B, Hkv, Nk, D].
        value: [B, Hkv, Nk, Dv].
        attn_mask: None, or key padding: bool [B, Nk], [B, 1, 1, Nk] or [1, 1, 1, Nk], True at real keys.
        dropout_p: Must be 0: this is inference only.
        is_causal: Must be False: causal attention is not approximated.
        scale: Factor of the scores; None: 1 / sqrt(D).
        enable_gqa: Whether H may be a multiple of Hkv.
        config: How the call is approximated; None: `Config()`.
        state: Warm start from the step before; one for each layer and guidance branch.

    Returns:
        The output [B, H, Nq, Dv] in query's dtype.

    >>> out = residua.sdpa(q, k, v)
    """
    if dropout_p:
        raise InputError(f"dropout_p={dropout_p}: this is inference only; leave dropout out")
    if is_causal:
        raise InputError("is_causal=True: causal attention is not approximated; call torch's function for it")
    if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
        raise InputError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True, as for torch"
        )
    mask = None if attn_mask is None else _key_padding(attn_mask, query.shape[0], key.shape[2])
    return attention(query, key, value, config, state, key_mask=mask, scale=scale)


def _key_padding(mask: Tensor, batch: int, keys: int) -> Tensor:
    """The mask as [B, Nk] bool; refuses a mask that differs between heads or queries."""
    wanted = f"wanted key padding as bool [B, Nk] or [B, 1, 1, Nk] with B = {batch}, Nk = {keys}"
    found = key_padding(mask, batch)
    if found is None or found.shape[1] != keys:
        raise InputError(f"attn_mask is {mask.dtype} {list(mask.shape)}: {wanted}; others stay with torch's")
    return found


def attend_route(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    route: Route,
    *,
    backend: str = "auto",
    scale: float | None = None,
    summary: SummaryKeys | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The raw operator: attention over the kept cells of a given route, nothing else.

    Args:
        q: [B, H, Nq, D].
        k: [B, Hkv, Nk, D].
        v: [B, Hkv, Nk, Dv].
        route: Which cells are kept. It is checked first; one that contradicts itself raises `RouteError`.
        backend: Name of a backend, or "auto".
        scale: Factor of the scores; None: 1 / sqrt(D).
        summary: Further keys of every query group, if any.
        out_dtype: Dtype of the output; None: q's.

    Returns:
        The output [B, H, Nq, Dv] and its natural log-sum-exp [B, H, Nq] in fp32. A row with nothing kept
        gets 0 and -inf.
    """
    call = validate(q, k, v, scale=scale)
    check_route(route, call)
    check_summary(summary, route, call)
    chosen = choose_backend(backend, Demand.of(call))
    with inference(q.device):
        return chosen.attend(q, k, v, route, call.scale, summary, out_dtype)

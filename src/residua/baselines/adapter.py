"""Makes rivals usable in a whole model: adds text tokens, padding, grouped heads, warm starts and receipts to
what each does with the video tokens of one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import exact_attention
from ..config import Config
from ..errors import InputError
from ..method.budget import SharedBudget
from ..method.inputs import Spans, validate
from ..method.route import pair_budget
from ..ops.backend import Backend, Demand
from ..ops.select import choose_backend
from ..receipt import ALWAYS, Pairs, Receipt
from ..types import Call, Partition, Route
from ..util.stopwatch import Stopwatch
from .base import RIVALS, Outcome, Rival, Task
from .methods import METHODS, Method


class RivalState:
    """Centres of the last call, from which the next one starts."""

    def __init__(self) -> None:
        self.centres: dict[int, dict[str, Tensor]] = {}  # part of the batch -> name -> centres

    @property
    def warm(self) -> bool:
        return any(self.centres.values())

    @property
    def nbytes(self) -> int:
        held = [x for part in self.centres.values() for x in part.values()]
        return sum(x.numel() * x.element_size() for x in held)

    def reset(self) -> None:
        self.centres.clear()


class RivalMethod(Method):
    """One rival in place of `residua.attention`."""

    def __init__(self, rival: Rival) -> None:
        self.rival = rival
        self.name, self.title, self.source = rival.name, rival.title, rival.source
        self.simplified = rival.simplified

    def new_state(self, shared: SharedBudget) -> RivalState:
        return RivalState()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: Config,
        state: RivalState | None,
        *,
        pinned_keys: Spans = None,
        exact_queries: Spans = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        grid: tuple[int, int, int] | None = None,
        time_stages: bool = False,
    ) -> tuple[Tensor, Receipt]:
        call = validate(q, k, v, scale=scale, pinned_keys=pinned_keys, exact_queries=exact_queries, key_mask=key_mask)
        backend = choose_backend(config.backend, Demand.of(call))
        run = _Run(self.rival, call, config, backend, Stopwatch(time_stages, q.device), grid)
        warm = state is not None and state.warm
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False), backend.session():
            if not call.routable:
                return exact_attention(call, backend), run.receipt([], warm)
            out, outcomes = run.attend(None if state is None else state.centres)
            return out.to(q.dtype), run.receipt(outcomes, warm)


class _Run:
    """One call of one rival, from the tensors of the model to output and receipt."""

    def __init__(
        self,
        rival: Rival,
        call: Call,
        config: Config,
        backend: Backend,
        stopwatch: Stopwatch,
        grid: tuple[int, int, int] | None,
    ) -> None:
        self.rival, self.call, self.config, self.backend = rival, call, config, backend
        self.stopwatch, self.grid = stopwatch, grid

    def attend(self, centres: dict[int, dict[str, Tensor]] | None) -> tuple[Tensor, list[Outcome]]:
        """The output [B, H, Nq, Dv] fp32, and what the rival did for each part of the batch."""
        call = self.call
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1], dtype=torch.float32)
        rows = call.free_queries.index(call.q.device)
        outcomes = []
        # rivals do not support padding, which differs from clip to clip: such clips run one by one
        parts = [slice(None)] if call.key_mask is None else [slice(b, b + 1) for b in range(len(out))]
        for number, part in enumerate(parts):
            found, outcome = self._video(part, None if centres is None else centres.setdefault(number, {}))
            out[part, :, rows] = found
            outcomes.append(outcome)
        with self.stopwatch.stage("exact rows"):
            for first, last in call.exact_queries.ranges:
                out[:, :, first:last] = self.backend.attend_rows(
                    call.q[:, :, first:last], call.k, call.v, call.key_mask, call.scale
                ).float()
        return out, outcomes

    def _video(self, part: slice, centres: dict[str, Tensor] | None) -> tuple[Tensor, Outcome]:
        """The routed rows: the rival on the video's keys, plus the pinned keys exactly."""
        call = self.call
        q = call.free_queries.take(call.q[part], 2).float()
        keys, pinned = call.free_keys.index(q.device), call.pinned_keys.index(q.device)
        if call.key_mask is not None:
            valid = call.key_mask[part][0]
            keys, pinned = keys[valid[keys]], pinned[valid[pinned]]
        k, v = (x[part].repeat_interleave(call.shares, dim=1).float() for x in (call.k, call.v))
        task = self._task(part, q.contiguous(), k[:, :, keys], v[:, :, keys], centres)
        reason = self.rival.refuses(task)
        if reason is not None:
            raise InputError(f"method {self.rival.name!r} cannot compute this call: {reason}; take another")
        outcome = self.rival.run(task)
        if not len(pinned):
            return outcome.out, outcome
        with self.stopwatch.stage("attention"):
            text, text_lse = _dense(self.backend, q, k[:, :, pinned], v[:, :, pinned], call.scale)
            share = torch.sigmoid(text_lse - outcome.total_lse)[..., None]
            return outcome.out + share * (text - outcome.out), outcome

    def _task(self, part: slice, q: Tensor, k: Tensor, v: Tensor, centres: dict[str, Tensor] | None) -> Task:
        call, config = self.call, self.config
        budget = int(pair_budget(call, config.density, 0)[part].min())
        possible = q.shape[2] * k.shape[2]
        groups = None
        if config.query_groups is not None or config.kv_groups is not None:
            by_default = Task(q, k, v, 1.0, call.scale).group_counts
            groups = config.query_groups or by_default[0], config.kv_groups or by_default[1]
        fits = self.grid is not None and self.grid[0] * self.grid[1] * self.grid[2] == q.shape[2]
        return Task(
            q,
            k,
            v,
            min(1.0, max(1, budget) / possible),
            call.scale,
            self.grid if fits else None,
            groups,
            config.backend,
            self.stopwatch,
            centres,
        )

    def receipt(self, outcomes: list[Outcome], warm: bool) -> Receipt:
        """Exact pairs by head; other work in pair equivalents (a pair is D + Dv products)."""
        call, config = self.call, self.config
        heads = call.q.shape[:2]
        possible = call.q.shape[2] * call.valid_keys[:, None].expand(heads)
        nothing = torch.zeros_like(possible)
        pairs = Pairs(nothing, nothing, nothing, possible, possible)
        if outcomes:
            routed = torch.cat([_per_head(outcome, heads[1]) for outcome in outcomes]).to(possible.device)
            pinned = (call.free_queries.count * call.valid_pinned_keys)[:, None].expand(heads)
            exact = call.exact_queries.count * call.valid_keys[:, None].expand(heads)
            pairs = Pairs(routed.expand(heads), nothing, pinned, exact, possible)
        dim, value_dim = call.q.shape[-1], call.v.shape[-1]
        weights = {"prediction": dim / (dim + value_dim), "compensation": 1.0}
        beside = {}
        for name, weight in weights.items():
            total = weight * sum(outcome.products.get(name, 0) for outcome in outcomes)
            if total:
                beside[name] = torch.full_like(possible, total / possible.numel(), dtype=torch.float64)
        route = outcomes[0].route if outcomes else None
        return Receipt(
            target=config.density,
            all_in=False,
            allowed=torch.full_like(possible, config.density, dtype=torch.float64),
            per_head=pairs,
            beside=beside,
            error_per_head=None,
            choice_per_head=None,
            head_dims=(dim, value_dim),
            groups=(0, 0) if route is None else (route.query.groups, route.kv.groups),
            backend=self.backend.name,
            warm=warm,
            reused_per_head=None,
            always=ALWAYS,
            timings=self.stopwatch.timings,
        )


def _per_head(outcome: Outcome, heads: int) -> Tensor:
    """Exact pairs of each head.  # [B, H]"""
    if outcome.route is not None:
        return outcome.route.pairs
    return torch.full((1, heads), outcome.executed // heads)


def _dense(backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every row against a few keys: output and log-sum-exp."""
    query, kv = (Partition.from_labels(torch.zeros(*x.shape[:3], dtype=torch.long, device=x.device), 1) for x in (q, k))
    cells = torch.ones(*q.shape[:2], 1, 1, dtype=torch.bool, device=q.device)
    return backend.attend(q, k, v, Route(query, kv, cells), scale, out_dtype=torch.float32)


def register_rivals() -> None:
    """Registers every usable rival as a method; Residua's own are registered already."""
    for rival in RIVALS.values():
        if not rival.reference and rival.name not in METHODS:
            METHODS.add(RivalMethod(rival))

"""A call of a model around what a method does with its video tokens: text tokens, padding, grouped heads, warm starts
and the receipt."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..api import fill_exact
from ..config import Config
from ..method.route import pair_budget
from ..ops.backend import Backend
from ..receipt import ALWAYS, Receipt
from ..types import Call
from ..util.stopwatch import Stopwatch
from .task import Outcome, Task, attend_all

Run = Callable[[Task], Outcome]


@dataclass
class CentresState:
    """Centres of the last call, from which the next one starts."""

    by_part: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # part of the batch -> name -> centres

    @property
    def warm(self) -> bool:
        return any(self.by_part.values())

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for part in self.by_part.values() for x in part.values())

    def reset(self) -> None:
        self.by_part.clear()


@dataclass(frozen=True)
class WholeCall:
    """From the tensors of a model to output and receipt."""

    call: Call
    config: Config
    backend: Backend
    stopwatch: Stopwatch
    grid: tuple[int, int, int] | None

    def attend(self, run: Run, centres: dict[int, dict[str, Tensor]] | None) -> tuple[Tensor, list[Outcome]]:
        """The output [B, H, Nq, Dv] fp32, and what the method did for each part of the batch."""
        call = self.call
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1], dtype=torch.float32)
        rows = call.free_queries.index(call.q.device)
        outcomes = []
        # methods do not support padding, which differs from clip to clip: such clips run one by one
        parts = [slice(None)] if call.key_mask is None else [slice(b, b + 1) for b in range(len(out))]
        for number, part in enumerate(parts):
            found, outcome = self._video(run, part, None if centres is None else centres.setdefault(number, {}))
            out[part, :, rows] = found
            outcomes.append(outcome)
        with self.stopwatch.stage("exact rows"):
            fill_exact(out, call, self.backend)
        return out, outcomes

    def _video(self, run: Run, part: slice, centres: dict[str, Tensor] | None) -> tuple[Tensor, Outcome]:
        """The routed rows: the method on the video's keys, plus the pinned keys exactly."""
        call = self.call
        q = call.free_queries.take(call.q[part], 2).float()
        keys, pinned = call.free_keys.index(q.device), call.pinned_keys.index(q.device)
        if call.key_mask is not None:
            valid = call.key_mask[part][0]
            keys, pinned = keys[valid[keys]], pinned[valid[pinned]]
        k, v = (x[part].repeat_interleave(call.heads_per_kv, dim=1).float() for x in (call.k, call.v))
        outcome = run(self._task(part, q.contiguous(), k[:, :, keys], v[:, :, keys], centres))
        if not len(pinned):
            return outcome.out, outcome
        with self.stopwatch.stage("attention"):
            text, text_lse = attend_all(self.backend, q, k[:, :, pinned], v[:, :, pinned], call.scale)
            share = torch.sigmoid(text_lse - outcome.total_lse)[..., None]
            return outcome.out + share * (text - outcome.out), outcome

    def _task(self, part: slice, q: Tensor, k: Tensor, v: Tensor, centres: dict[str, Tensor] | None) -> Task:
        budget = int(pair_budget(self.call, self.config.density, 0)[part].min())
        config = self.config.replace(density=min(1.0, max(1, budget) / (q.shape[2] * k.shape[2])))
        fits = self.grid is not None and self.grid[0] * self.grid[1] * self.grid[2] == q.shape[2]
        return Task(q, k, v, config, self.call.scale, self.grid if fits else None, self.stopwatch, centres)

    def receipt(self, outcomes: list[Outcome], warm: bool) -> Receipt:
        """Exact pairs by head; other work in pair equivalents (a pair is D + Dv products)."""
        call, config = self.call, self.config
        routes = [outcome.route for outcome in outcomes if outcome.route is not None]
        route = routes[0] if routes else None
        found = Receipt.of(call, config, self.backend.name, self.stopwatch.timings, route, warm=warm)
        pairs = found.per_head
        if routes:
            pairs = replace(pairs, routed=torch.cat([one.pairs for one in routes]))
        dim, value_dim = found.head_dims
        weights = {"prediction": dim / (dim + value_dim), "compensation": 1.0}
        beside = {}
        for name, weight in weights.items():
            total = weight * sum(outcome.products.get(name, 0) for outcome in outcomes)
            if total:
                beside[name] = torch.full_like(pairs.possible, total / pairs.possible.numel(), dtype=torch.float64)
        allowed = torch.full_like(found.allowed, config.density)
        return replace(found, all_in=False, always=ALWAYS, allowed=allowed, per_head=pairs, beside=beside)

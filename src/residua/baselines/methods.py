"""The contract of a method of sparse attention, and the methods by name: what `accelerate(pipe, method="svg2")`,
`residua compare --methods` and `residua baselines` look up.

Every method takes the same call and accounts for it in the same `Receipt`, so that a host, a report and a table treat
all of them alike.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from torch import Tensor

from ..api import exact_attention
from ..config import Config
from ..errors import InputError
from ..method.budget import SharedBudget
from ..method.inputs import Spans, validate
from ..ops.backend import Demand
from ..ops.matrices import inference, wait_for
from ..ops.select import choose_backend
from ..receipt import Receipt
from ..registry import Registry
from ..types import Partition, Route
from ..util.stopwatch import Stopwatch
from .task import Outcome, Task
from .whole_call import CentresState, WholeCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT = "anchored"


class Arguments(TypedDict, total=False):
    """What a call of a model may have, as for `residua.attention`."""

    pinned_keys: Spans  # keys that every query keeps (text tokens)
    exact_queries: Spans  # query rows that are computed against every key
    key_mask: Tensor | None  # [B, Nk] bool, False at padding
    scale: float | None  # factor of the scores; None: 1 / sqrt(D)


class Method:
    """Base of the methods. A new one is a class with `@METHODS.register`, in a file of its own; most of them define
    `group` and `route`, and `reconstruct` if they do not drop what they skip."""

    name: str  # as in `accelerate(pipe, method=...)`
    title: str  # as in a table
    source: str  # whose idea it is, and where it is described
    simplified: str = "nothing"  # what this implementation leaves out of that description
    reference: ClassVar[bool] = False  # cannot be run in a model: dense attention, the oracle
    estimates_error: ClassVar[bool] = False  # whether its receipts say how far off a call is

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        """Query groups, K/V groups, and the products that found them."""
        raise NotImplementedError

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        """The cells that are evaluated, and the products that predicted them."""
        raise NotImplementedError

    def reconstruct(self, task: Task, route: Route, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """What stands for the skipped cells: the whole output, the log of the added mass [B, H, Nq], and the products
        that it took. By default nothing: skipped cells are dropped."""
        return out, None, 0

    def refuses(self, task: Task) -> str | None:
        """Why this method cannot compute the video tokens of a call, or None."""
        return None

    def run(self, task: Task) -> Outcome:
        """Computes the video tokens of one call."""
        with task.stage("grouping"):
            query, kv, grouping = self.group(task)
        with task.stage("routing"):
            route, prediction = self.route(task, query, kv)
        kept, lse = task.attend(route)
        out, added, compensation = self.reconstruct(task, route, kept, lse)
        products = {"prediction": prediction, "compensation": compensation, "grouping": grouping}
        taken = {name: count for name, count in products.items() if count}
        return Outcome(out, {"routed": int(route.pairs.sum())}, taken, route, lse, added)

    def settings(self, config: Config) -> Config:
        """The config that `attend` gets for what the user asked for; InputError if this method cannot do it."""
        if config.max_error is not None and not self.estimates_error:
            raise InputError(
                f"max_error={config.max_error:g} with method {self.name!r}: it does not estimate its error, "
                "so no bound can be kept; leave max_error out, or take method 'anchored'"
            )
        return config

    def new_state(self, shared: SharedBudget) -> Any:
        """What a layer carries from step to step in one guidance branch; it has `nbytes` and `reset()`. `shared` is
        the budget of the whole run, for methods that move it between layers."""
        return CentresState()

    def lend(self, state: Any, other: Any) -> None:
        """Lets the first call of a layer, whose `state` is new, start from what the same layer carries in another
        guidance branch or transformer; by default it does not."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: Config,
        state: Any,
        *,
        grid: tuple[int, int, int] | None = None,
        time_stages: bool = False,
        **more: Unpack[Arguments],
    ) -> tuple[Tensor, Receipt]:
        """One call of a model: the output [B, H, Nq, Dv] in q's dtype, and the receipt. The arguments are those of
        `residua.attention`, with `config` from `settings`, `state` from `new_state`, and the `grid` (frames, height
        and width) of the video tokens, for methods that use positions."""
        call = validate(q, k, v, **more)
        chosen = choose_backend(config.backend, Demand.of(call))
        warm = state is not None and state.warm
        with inference(q.device), chosen.session() as backend:
            whole = WholeCall(call, config, backend, Stopwatch(time_stages, partial(wait_for, q.device)), grid)
            if not call.routable:
                return exact_attention(call, backend), whole.receipt([], warm)
            out, outcomes = whole.attend(self._run_or_refuse, None if state is None else state.by_part)
            return out.to(q.dtype), whole.receipt(outcomes, warm)

    def _run_or_refuse(self, task: Task) -> Outcome:
        reason = self.refuses(task)
        if reason is not None:
            raise InputError(f"method {self.name!r} cannot compute this call: {reason}; take another")
        return self.run(task)


METHODS: Registry[Method] = Registry("method")


def method_names() -> list[str]:
    """Every name that `find_method` knows."""
    return [name for name, method in METHODS.items() if not method.reference]


def find_method(name: str) -> Method:
    """The method of that name, one of `method_names()`; InputError if there is none."""
    if name not in method_names():
        raise InputError(f"method={name!r} is not known; wanted one of {', '.join(method_names())}")
    return METHODS[name]

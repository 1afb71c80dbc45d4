"""Residua's own methods: `residua.attention` with certain settings."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..api import attention
from ..config import Config
from ..method.budget import SharedBudget
from ..method.route import route_cells
from ..method.stages import SizedCall
from ..receipt import Receipt
from ..state import State
from .groups import response_groups, response_products
from .methods import METHODS, Method
from .task import Outcome, Task


@dataclass(frozen=True)
class Own(Method):
    """`residua.attention` with the settings in which `like` differs from the default."""

    name: str
    title: str
    source: str
    like: Config

    @property
    def estimates_error(self) -> bool:  # type: ignore[override]
        return self.like.takes_probes

    def settings(self, config: Config) -> Config:
        default, like = Config().to_dict(), self.like.to_dict()
        changes = {name: value for name, value in like.items() if value != default[name]}
        return super().settings(config).replace(**{"reconstruction": self.like.reconstruction, **changes})

    def new_state(self, shared: SharedBudget) -> State:
        return State(shared)

    def lend(self, state: State, other: State) -> None:
        state.start_from(other)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, config: Config, state: State | None, *, grid: Any = None, **more: Any
    ) -> tuple[Tensor, Receipt]:
        return attention(q, k, v, config, state, return_receipt=True, **more)

    def run(self, task: Task) -> Outcome:
        config = task.on_equal_terms(self.settings(task.config))
        out, receipt = attention(task.q, task.k, task.v, config, scale=task.scale, return_receipt=True)
        if receipt.all_in:  # counted as it is charged: a pair is D + Dv products
            prediction = round(float(receipt.beside["routing"].sum())) if "routing" in receipt.beside else 0
            compensation = round(sum(float(work.sum()) for name, work in receipt.beside.items() if name != "routing"))
        else:
            prediction = receipt.routing_products
            sizes, widths = SizedCall.of(task.call, config, task.backend).sizes, task.v.shape[-1] / task.q.shape[-1]
            compensation = int(task.heads * task.rows * 2 * sizes.residual_rank * widths) if receipt.pairs.probe else 0
        return Outcome(
            out,
            {"routed": receipt.pairs.routed, "probe": receipt.pairs.probe},
            {"prediction": prediction, "compensation": compensation, "grouping": response_products(task, config)},
            probe_rows=receipt.probe_rows,
            all_in=receipt.all_in,
        )


class HardDrop(Own):
    """Response-coupled groups, cells chosen by their mass at the query centroids, softmax over the kept keys only."""

    def run(self, task: Task) -> Outcome:
        """The same stages as in `residua.attention`, for their route."""
        config = task.on_equal_terms(self.settings(task.config))
        sized = SizedCall.of(task.call, config, task.backend)
        route = route_cells(sized.grouped(response_groups(task, config))).route
        out, lse = task.attend(route)
        prediction = 0 if config.density == 1.0 else task.heads * route.query.groups * task.keys
        products = {"prediction": prediction, "grouping": response_products(task, config)}
        return Outcome(out, {"routed": int(route.pairs.sum())}, products, route, lse)


PAPER = "Partition the Support, Reconstruct the Residual (SparsePR), 2026"
METHODS.add(HardDrop("hard-drop", "hard drop", f"{PAPER}, section 4.1 alone", Config(reconstruction="none")))
METHODS.add(Own("paper", "SparsePR (the paper)", f"{PAPER}; Config.paper()", Config.paper()))
METHODS.add(Own("authors", "SparsePR (the authors' choices)", f"{PAPER}; Config.authors()", Config.authors()))
METHODS.add(Own("tail", "tail (Residua)", "this project, docs/method.md", Config(reconstruction="tail")))
METHODS.add(Own("anchored", "anchored (Residua)", "this project, docs/method.md", Config()))

"""Methods of sparse attention by name: what `accelerate(pipe, method="svg2")` and `residua compare --methods`
look up.

Every method takes the same call and accounts for it in the same `Receipt`, so that a host, a report and a
table treat all of them alike. Residua's own methods are `residua.attention` with certain settings; the
methods of others live in `residua.baselines` and are imported when one of them is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..api import attention
from ..config import Config
from ..errors import InputError
from ..method.budget import SharedBudget
from ..method.inputs import Spans
from ..receipt import Receipt
from ..registry import Registry
from ..state import State

DEFAULT = "anchored"


class Method:
    """Base of the methods. A new one is an instance given to `METHODS.add`."""

    name: str  # as in `accelerate(pipe, method=...)`
    title: str  # as in a table
    source: str  # whose idea it is, and where it is described
    simplified: str = "nothing"  # what this implementation leaves out of that description
    estimates_error: ClassVar[bool] = False  # whether its receipts say how far off a call is

    def settings(self, config: Config) -> Config:
        """The config as this method takes it.

        Args:
            config: What the user asked for.

        Returns:
            The config that `attend` gets.

        Raises:
            InputError: If it asks for something that this method cannot do.
        """
        if config.max_error is not None and not self.estimates_error:
            raise InputError(
                f"max_error={config.max_error:g} with method {self.name!r}: it does not estimate its error, "
                "so no bound can be kept; leave max_error out, or take method 'anchored'"
            )
        return config

    def new_state(self, shared: SharedBudget) -> Any:
        """What a layer carries from step to step in one guidance branch; it has `nbytes` and `reset()`.

        Args:
            shared: The budget of the whole run, for methods that move it between layers.
        """
        raise NotImplementedError

    def lend(self, state: Any, other: Any) -> None:
        """Lets the first call of a layer start from what a similar layer carries; by default it does not.

        Args:
            state: New, from `new_state`.
            other: Of the same layer in another guidance branch, or in another transformer.
        """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: Config,
        state: Any,
        *,
        pinned_keys: Spans = None,
        exact_queries: Spans = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        grid: tuple[int, int, int] | None = None,
        time_stages: bool = False,
    ) -> tuple[Tensor, Receipt]:
        """One call; the arguments are those of `residua.attention`.

        Args:
            q: [B, H, Nq, D].
            k: [B, Hkv, Nk, D].
            v: [B, Hkv, Nk, Dv].
            config: From `settings`.
            state: From `new_state`.
            pinned_keys: Keys that every query keeps (text tokens).
            exact_queries: Query rows that are computed against every key.
            key_mask: [B, Nk] bool, False at padding.
            scale: Factor of the scores; None: 1 / sqrt(D).
            grid: Frames, height and width of the video tokens, for methods that use positions.
            time_stages: Whether the receipt holds the time of every stage.

        Returns:
            The output [B, H, Nq, Dv] in q's dtype, and the receipt.
        """
        raise NotImplementedError


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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: Config,
        state: State | None,
        *,
        pinned_keys: Spans = None,
        exact_queries: Spans = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        grid: tuple[int, int, int] | None = None,
        time_stages: bool = False,
    ) -> tuple[Tensor, Receipt]:
        return attention(
            q,
            k,
            v,
            config,
            state,
            pinned_keys=pinned_keys,
            exact_queries=exact_queries,
            key_mask=key_mask,
            scale=scale,
            return_receipt=True,
            time_stages=time_stages,
        )


METHODS: Registry[Method] = Registry("method")
# Names of the lab's methods, written out so that the lab is imported only when one of them is asked for.
RIVALS = ("window", "sta", "sparge", "sparge-gate", "xattention", "pisa", "svg2", "svg2-budget", "svoo", "svg-ear")


def method_names() -> list[str]:
    """Every name that `find_method` knows."""
    return list(dict.fromkeys([*METHODS, *RIVALS]))


def find_method(name: str) -> Method:
    """The method of that name.

    Args:
        name: One of `method_names()`.

    Returns:
        The method.

    Raises:
        InputError: If there is none of that name.
    """
    if name in RIVALS and name not in METHODS:
        from .adapter import register_rivals

        register_rivals()
    if name not in METHODS:
        raise InputError(f"method={name!r} is not known; wanted one of {', '.join(method_names())}")
    return METHODS[name]


PAPER = "Partition the Support, Reconstruct the Residual (SparsePR), 2026"
METHODS.add(Own("anchored", "anchored (Residua)", "this project, docs/method.md", Config()))
METHODS.add(Own("paper", "SparsePR (the paper)", f"{PAPER}; Config.paper()", Config.paper()))
METHODS.add(Own("authors", "SparsePR (the authors' choices)", f"{PAPER}; Config.authors()", Config.authors()))
METHODS.add(Own("tail", "tail (Residua)", "this project, docs/method.md", Config(reconstruction="tail")))
METHODS.add(Own("hard-drop", "hard drop", f"{PAPER}, section 4.1 alone", Config(reconstruction="none")))

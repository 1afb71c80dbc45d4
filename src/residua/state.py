"""What a layer carries from one denoising step to the next: its groups, and what its heads may spend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .config import Config
from .types import Call, GroupMemory

if TYPE_CHECKING:
    from .method.budget.shared import SharedBudget


class State:
    """Warm start of one layer in one guidance branch. Use one for each of these, and call `reset()` before a
    new video; a call of another shape, device, dtype or grouping starts cold by itself.

    Not safe to share between threads that call at the same time.
    """

    def __init__(self, shared: SharedBudget | None = None) -> None:
        """Args:
        shared: The budget that this layer shares with others (`Config.balance`); None: its heads share a
            budget of their own.
        """
        self._key: tuple[object, ...] | None = None
        self._memory: GroupMemory | None = None
        self._budget_key: tuple[object, ...] | None = None
        self._given = shared
        self.shared = shared  # None: no call has shared a budget yet
        self.budget: Tensor | None = None  # [B, H] fp64, what the heads may spend next under an error bound

    @property
    def warm(self) -> bool:
        """Whether the next call of the same kind starts from the groups of the last one."""
        return self._memory is not None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state holds for the next step."""
        return self._memory.nbytes if self._memory else 0

    def reset(self) -> None:
        """Forgets everything: the next call starts cold. A `shared` budget that was passed in is not reset."""
        self._key = self._memory = self._budget_key = self.budget = None
        self.shared = self._given

    def start_from(self, other: State) -> None:
        """Starts the first call from the groups of another state that saw a similar call: the same layer in
        another guidance branch, or in another transformer of the same shape. Such groups fit less well than
        those of the step before, so tokens are always clustered again, in a few steps.

        Args:
            other: The state to start from; nothing happens if it is cold, or if this one is warm.
        """
        if other._memory is not None and self._memory is None:
            centroids = GroupMemory(*other._memory.centroids, borrowed=True)
            self._key, self._memory = other._key, centroids

    def memory(self, call: Call, config: Config) -> GroupMemory | None:
        """The groups of the last call.

        Args:
            call: The coming call.
            config: Its settings.

        Returns:
            None if the coming call cannot start from them.
        """
        return self._memory if self._key == _key(call, config) else None

    def knows_budget(self, call: Call, config: Config) -> bool:
        """Whether the learned budget was learned for calls like this one.

        Args:
            call: The coming call.
            config: Its settings.

        Returns:
            True if shapes, device and settings are the same.
        """
        return self._budget_key == _budget_key(call, config)

    def remember_budget(self, call: Call, config: Config, budget: Tensor | None) -> None:
        """Keeps what the heads may spend next, and the kind of call for which that was learned.

        Args:
            call: The finished call.
            config: Its settings.
            budget: [B, H] fp64; None: nothing was learned.
        """
        self._budget_key, self.budget = _budget_key(call, config), budget

    def remember(self, call: Call, config: Config, memory: GroupMemory) -> None:
        """Keeps the groups of a call for the next one.

        Args:
            call: The finished call.
            config: Its settings.
            memory: Its groups.
        """
        self._key, self._memory = _key(call, config), memory


def _key(call: Call, config: Config) -> tuple[object, ...]:
    rows = (call.free_queries.ranges, call.free_keys.ranges)
    shapes = (tuple(call.q.shape), tuple(call.k.shape), call.q.device, call.q.dtype)
    return (*shapes, *rows, config.partition)


def _budget_key(call: Call, config: Config) -> tuple[object, ...]:
    # a shared budget knows how errors follow the density, and may be given another one in every step
    density = None if config.balance else config.density
    dials = (density, config.max_error, config.balance, config.reconstruction)
    return (tuple(call.q.shape), tuple(call.k.shape), call.q.device, *dials)

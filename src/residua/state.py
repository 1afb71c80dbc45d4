"""What a layer carries from one denoising step to the next: the centroids of its groups, and what its heads
may spend."""

from __future__ import annotations

from torch import Tensor

from .config import Config
from .sizing import Sizes
from .types import Call, Grouping


class State:
    """Warm start of one layer in one guidance branch. Give each its own, and `reset()` it before a new video;
    a call of another shape, device, dtype or grouping starts cold by itself.

    Not safe to share between threads that call at the same time.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._centroids: tuple[Tensor, Tensor] | None = None
        self._budget: tuple[tuple[object, ...], Tensor] | None = None

    @property
    def warm(self) -> bool:
        return self._centroids is not None

    def reset(self) -> None:
        self._key = self._centroids = self._budget = None

    def centroids(self, call: Call, config: Config, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        """Centroids (queries [B, H, Cq, D], keys [B, Hkv, Ck, D]) of the last call if they fit this one."""
        return self._centroids if self._key == _key(call, config, sizes) else None

    def budget(self, call: Call, config: Config) -> Tensor | None:
        """What the heads may spend, as learned from the last call, if it was asked the same.  # [B, H]
        fp64"""
        return self._budget[1] if self._budget and self._budget[0] == _budget_key(call, config) else None

    def set_budget(self, call: Call, config: Config, density: Tensor) -> None:
        self._budget = (_budget_key(call, config), density)

    def remember(self, call: Call, config: Config, sizes: Sizes, grouping: Grouping) -> None:
        """Keeps the centroids in the call's own dtype: they are a start, not a result."""
        self._key = _key(call, config, sizes)
        keys = grouping.kv_centroids[..., : sizes.kv_groups, :]
        self._centroids = (grouping.query_centroids.to(call.q.dtype), keys.to(call.q.dtype))


def _key(call: Call, config: Config, sizes: Sizes) -> tuple[object, ...]:
    rows = (call.free_queries.ranges, call.free_keys.ranges)
    shapes = (tuple(call.q.shape), tuple(call.k.shape), call.q.device, call.q.dtype)
    return (*shapes, *rows, config.partition, sizes.query_groups, sizes.kv_groups)


def _budget_key(call: Call, config: Config) -> tuple[object, ...]:
    dials = (config.density, config.max_error, config.balance, config.reconstruction)
    return (tuple(call.q.shape), tuple(call.k.shape), call.q.device, *dials)

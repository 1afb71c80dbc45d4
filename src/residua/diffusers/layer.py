"""One self-attention layer: decides between dense and sparse, runs the call, writes it down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention import attention
from ..errors import IntegrationError
from ..execution import Demand, choose_backend
from ..state import State
from .families import Family, Grid
from .log import LayerLog
from .settings import Settings, part_of
from .tracking import Tracker

Range = tuple[int, int]

FIRST_STEPS = "first steps"
FIRST_LAYERS = "first layers"
NOT_SELECTED = "layer not selected"
FEW_TOKENS = "fewer than min_tokens"
TEXT_ONLY = "text pathway"
ROW_MASK = "mask is not key padding"
REMOVED = "acceleration removed"


@dataclass
class Site:
    """What the layers of one transformer share: its settings and the forward pass that is under way."""

    family: Family
    settings: Settings
    tracker: Tracker
    video: int = 0  # tokens
    grid: Grid = (0, 0, 0)
    grids: set[Grid] = field(default_factory=set)
    active: bool = True
    profile: bool = False  # time every stage of the sparse calls

    def dense_steps(self) -> int:
        share = self.settings.dense_steps
        total = self.tracker.total_steps()
        if isinstance(share, float) and share > 0.0 and total is None:
            raise IntegrationError(
                f"dense_steps={share} is a share of the steps, and nothing says how many there are; "
                "accelerate the pipeline, or pass scheduler= or steps=, or a whole number of dense_steps"
            )
        return part_of(share, total or 0)


class Layer:
    """`backend` is the dense backend that the user chose for it (None: the default of diffusers)."""

    def __init__(self, site: Site, index: int, name: str, first: bool, selected: bool) -> None:
        self.site = site
        self.index = index
        self.name = name
        self.first = first  # among the first layers, which stay dense
        self.selected = selected
        self.backend: Any = None
        self.log = LayerLog()
        self._states: dict[str, State] = {}  # guidance branch -> centres of the previous step

    def forget(self) -> None:
        """The next sparse call starts cold."""
        self._states.clear()

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool
    ) -> Tensor:
        """q [B, Nq, H, D], k and v [B, Nk, Hkv, D] -> [B, Nq, H, D]."""
        reason = self._why_dense(q, mask, causal)
        if reason == FIRST_STEPS:
            # Refused now, not after minutes of dense steps.
            choose_backend(
                self.site.settings.config.backend, Demand(q.device, q.dtype, q.shape[-1], v.shape[-1])
            )
        if reason is not None:
            with self.log.dense_call(reason, q, k):
                return self._dense(q, k, v, mask, scale, causal)
        try:
            return self._sparse(q, k, v, mask, scale)
        except BaseException:
            # Half-updated centres must not warm-start a later call.
            self.forget()
            raise

    def _why_dense(self, q: Tensor, mask: Tensor | None, causal: bool) -> str | None:
        site = self.site
        if not site.active:
            return REMOVED
        if causal:
            return TEXT_ONLY
        if not self.selected:
            return NOT_SELECTED
        if site.tracker.step < site.dense_steps():
            return FIRST_STEPS
        if self.first:
            return FIRST_LAYERS
        if site.video < site.settings.min_tokens:
            return FEW_TOKENS
        return ROW_MASK if mask is not None and key_padding(mask, q.shape[0]) is None else None

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool
    ) -> Tensor:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
            backend=self.backend,
        )  # fmt: skip

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        exact, pinned = self._place(q.shape[1], k.shape[1])
        state = self._states.setdefault(self.site.tracker.branch, State())
        with self.log.sparse_call(q, k) as record:
            out, receipt = attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                self.site.settings.config,
                state,
                pinned_keys=pinned or None,
                exact_queries=exact or None,
                key_mask=None if mask is None else key_padding(mask, q.shape[0]),
                scale=scale,
                return_receipt=True,
                profile=self.site.profile,
            )
            record(receipt)
        return out.transpose(1, 2)

    def _place(self, queries: int, keys: int) -> tuple[list[Range], list[Range]]:
        """The query rows and the keys that are not video."""
        video = self.site.video
        start_q, start_k = self.site.family.video_start(queries, keys, video)
        if min(start_q, start_k) < 0 or start_q + video > queries or start_k + video > keys:
            raise IntegrationError(
                f"{self.name}: {video} video tokens do not fit {queries} queries and {keys} keys at "
                f"{start_q}, {start_k}; the {self.site.family.name} entry does not know this input: remove() "
                "Residua"
            )
        return _around(start_q, start_q + video, queries), _around(start_k, start_k + video, keys)


def key_padding(mask: Tensor, batch: int) -> Tensor | None:
    """The mask as [B, Nk], True where a key is valid; None if it masks more than keys."""
    per_key = mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1)
    if mask.dtype is not torch.bool or not per_key or mask.shape[0] not in (1, batch):
        return None
    return mask.reshape(mask.shape[0], math.prod(mask.shape[1:])).expand(batch, -1)


def _around(start: int, stop: int, total: int) -> list[Range]:
    return [(low, high) for low, high in ((0, start), (stop, total)) if high > low]

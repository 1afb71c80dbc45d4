"""One self-attention layer of diffusers: knows where its calls belong and how they run dense."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import IntegrationError
from .. import HostAttention, Pass, Site
from .families import Family
from .tracking import Tracker

TEXT_ONLY = "text pathway"
REMOVED = "acceleration removed"
ELSEWHERE = "in another model's forward pass"  # the ControlNet of Z-Image runs layers of the transformer


@dataclass
class ForwardPass:
    """What the layers of one transformer know about the current forward pass."""

    family: Family
    tracker: Tracker
    place: Pass | None = None  # in the run; None: before the first forward pass
    video: int = 0  # tokens
    layout: Any = None  # what else the family must know about it
    active: bool = True  # False after remove()
    elsewhere: bool = False  # another model of the pipeline runs; what is known here is of an earlier pass


@dataclass(eq=False)
class AttentionLayer:
    """One layer of an accelerated transformer."""

    host: HostAttention
    now: ForwardPass
    index: int
    name: str
    depth: int
    backend: Any = None  # the dense backend that the user chose for it; None: the default of diffusers
    perturbed: bool = False  # whether a hook of diffusers replaces its attention by the values

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
        """q [B, Nq, H, D], k and v [B, Nk, Hkv, D] -> [B, Nq, H, D]."""
        why = self._why_dense(q.shape[1], k.shape[1], causal)
        site = self.site() if why else self.site(q.shape[1], k.shape[1])
        return self._call(site, lambda: self.dense(q, k, v, mask, scale, causal), why, q, k, v, mask=mask, scale=scale)

    def leave_dense(self, given: tuple[Any, ...], why: str) -> Tensor:
        """A dense call with arguments that Residua does not take: those of dispatch_attention_fn, in its order."""
        return self._call(self.site(), lambda: self._dispatch(*given), why, *given[:3])

    def _call(self, site: Site, dense: Callable[[], Tensor], why: str | None, *qkv: Tensor, **more: Any) -> Tensor:
        """The host's call, which has the heads before the tokens.  # [B, N, H, D]"""
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return self.host.call(q, k, v, site, lambda: dense().transpose(1, 2), why_dense=why, **more).transpose(1, 2)

    def _why_dense(self, queries: int, keys: int, causal: bool) -> str | None:
        if not self.now.active:
            return REMOVED
        if self.now.elsewhere:
            return ELSEWHERE
        return TEXT_ONLY if causal else self.now.family.why_dense(queries, keys)

    def site(self, queries: int | None = None, keys: int | None = None) -> Site:
        """Where a call with that many queries and keys belongs; without these numbers, no token counts as
        text."""
        text_queries, text_keys = ((), ()) if queries is None or keys is None else self._text(queries, keys)
        place = self.now.place or self.now.tracker.place()
        return Site(self.index, place, text_queries, text_keys, self.depth, self.name)

    def _text(self, queries: int, keys: int) -> tuple[Any, Any]:
        """The query rows and the keys that are not video."""
        try:
            return self.now.family.text(queries, keys, self.now.video, self.now.layout)
        except IntegrationError as error:
            raise IntegrationError(f"{self.name}: {error}") from None

    def dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool) -> Tensor:
        """Dense attention as diffusers computes it.  # [B, Nq, H, D]"""
        if mask is not None and self.now.family.dense_per_sample:
            out = torch.zeros_like(q)
            for sample, valid in enumerate(mask.flatten(1)):
                rows = valid.nonzero()[:, 0]
                own_q, own_k, own_v = (x[sample : sample + 1, rows] for x in (q, k, v))
                out[sample, rows] = self.dispatch(own_q, own_k, own_v, None, scale, False)[0]
            return out
        return self.dispatch(q, k, v, mask, scale, causal)

    def dispatch(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool
    ) -> Tensor:
        """One call on the user's backend.  # [B, Nq, H, D]"""
        grouped = q.shape[2] != k.shape[2]
        return self._dispatch(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)

    def _dispatch(self, *given: Any, **named: Any) -> Tensor:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(*given, backend=self.backend, **named)

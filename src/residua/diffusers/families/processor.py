"""Base of Residua's own attention processors, for models whose processors never reach the dispatcher."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch import tagged_dispatch


class OwnProcessor:
    """Does what the processor of diffusers does, but hands its backend (the layer's tag) to the
    dispatcher."""

    # The names that diffusers' set_attention_backend and enable_parallelism look for.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, original: Any) -> None:
        self._residua_original = original

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """q [B, Nq, H, D], k and v [B, Nk, Hkv, D], key_mask [B, Nk] -> [B, Nq, H * D]."""
        mask = None if key_mask is None else key_mask[:, None, None, :]
        out = tagged_dispatch(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return out.flatten(2, 3).to(q.dtype)

    def __reduce__(self) -> Any:
        # A copy or a pickle of the model is a plain model: it gets diffusers' processor back.
        return _same, (self._residua_original,)


def _same(original: Any) -> Any:
    return original


def heads_of(attn: Any, x: Tensor) -> Tensor:
    return x.unflatten(2, (attn.heads, -1))  # [B, N, H, D]

"""Base of Residua's own attention processors, for models whose processors never reach the dispatcher."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...padding import changes
from ..dispatch import tagged_dispatch


class OwnProcessor:
    """Does what the processor of diffusers does, but passes its backend (the layer's tag) to the
    dispatcher."""

    # The names that diffusers' set_attention_backend and enable_parallelism look for.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, original: Any) -> None:
        self._residua_original = original

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, Nq, H, D], k and v [B, Nk, Hkv, D], mask [B, 1, 1, Nk] -> [B, Nq, H * D]."""
        out = tagged_dispatch(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return out.flatten(2, 3).to(q.dtype)

    def __reduce__(self) -> Any:
        # A copy or a pickle of the model is a plain model: it gets diffusers' processor back.
        return _same, (self._residua_original,)


# Weak reference to the text's mask, how often it was changed, video tokens, key mask.
_last_mask: tuple[Any, int, int, Tensor] | None = None


def joint_key_mask(text_mask: Tensor, video: int) -> Tensor:
    """The key mask of [video, text], made from the mask of the text: every video key is valid.

    All layers of a forward pass get the same tensor, so its padding is read from the device only once.

    Args:
        text_mask: [B, text].
        video: Number of video tokens, which come first.

    Returns:
        [B, 1, 1, video + text] bool.
    """
    global _last_mask
    if torch.compiler.is_compiling():
        return functional.pad(text_mask.bool(), (video, 0), value=True)[:, None, None]
    known = _last_mask
    if known is None or known[0]() is not text_mask or known[1:3] != (changes(text_mask), video):
        mask = functional.pad(text_mask.bool(), (video, 0), value=True)[:, None, None]
        _last_mask = known = (weakref.ref(text_mask), changes(text_mask), video, mask)
    return known[3]


def _same(original: Any) -> Any:
    return original


def heads_of(attn: Any, x: Tensor) -> Tensor:
    return x.unflatten(2, (attn.heads, -1))  # [B, N, H, D]


def normed(norm: Any, x: Tensor) -> Tensor:
    """Applies the norm of queries or keys if the model has one."""
    return x if norm is None else norm(x)


def rotate_after(x: Tensor, text: int, rotary: Any) -> Tensor:
    """Rotary embedding of the rows after the text.  # [B, text + video, H, D]"""
    from diffusers.models.embeddings import apply_rotary_emb

    video: Any = apply_rotary_emb(x[:, text:].transpose(1, 2), rotary)
    return torch.cat([x[:, :text], video.transpose(1, 2)], dim=1)

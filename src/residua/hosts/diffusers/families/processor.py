"""Base of Residua's own attention processors, for models whose processors never reach the dispatcher."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...padding import changes
from ..dispatch import same, tagged_dispatch


class OwnProcessor:
    """Does what the processor of diffusers does, but passes its backend (the layer's tag) to the dispatcher. By
    default for attention over the video alone; joint attention overrides `compute`."""

    # The names that diffusers' set_attention_backend and enable_parallelism look for.
    _attention_backend: Any = None
    _parallel_config: Any = None
    rotary_unbind_dim = -1  # the two numbers that are rotated together are neighbours; -2: lie in two halves

    def __init__(self, original: Any) -> None:
        self._residua_original = original

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        return self.compute(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    def compute(self, attn: Any, video: Tensor, text: Any, mask: Any, rotary: Any) -> Any:
        """The arguments that diffusers gives -> what its processor returns."""
        return project_out(attn, self.attend(*self.project(attn, video, rotary), self.key_mask(mask)))

    def key_mask(self, mask: Any) -> Tensor | None:
        """The key mask [B, 1, 1, N] of attention over the video alone; None if every key is valid."""
        return None

    def project(self, attn: Any, x: Tensor, rotary: Any = None, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x [B, N, C], the first two rotated from row `first` on.  # [B, N, H, D]"""
        q, k, v = heads_of(attn, *self.linear(attn, x))
        q, k = normed(attn.norm_q, q), normed(attn.norm_k, k)
        return (q, k, v) if rotary is None else (self._rotate(q, rotary, first), self._rotate(k, rotary, first), v)

    def linear(self, attn: Any, x: Tensor) -> tuple[Tensor, ...]:
        return attn.to_q(x), attn.to_k(x), attn.to_v(x)

    def _rotate(self, x: Tensor, rotary: Any, first: int) -> Tensor:
        return torch.cat([x[:, :first], self.rotate(x[:, first:], rotary)], dim=1) if first else self.rotate(x, rotary)

    def rotate(self, x: Tensor, rotary: Any) -> Tensor:
        """Rotary embedding of queries or keys.  # [B, N, H, D]"""
        from diffusers.models.embeddings import apply_rotary_emb

        rotated: Any = apply_rotary_emb(x, rotary, use_real_unbind_dim=self.rotary_unbind_dim, sequence_dim=1)
        return rotated

    def attend_joint(self, attn: Any, video: Tensor, text: Tensor, rotary: Any = None, text_mask: Any = None) -> Any:
        """Attention over [video, text] with projections for each -> [B, video, H * D], [B, text, H * D]."""
        both = zip(self.project(attn, video, rotary), project_text(attn, text), strict=True)
        q, k, v = (torch.cat(pair, dim=1) for pair in both)
        mask = None if text_mask is None else joint_key_mask(text_mask, k.shape[1] - text_mask.shape[1])
        return self.attend(q, k, v, mask).split([video.shape[1], text.shape[1]], dim=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, Nq, H, D], k and v [B, Nk, Hkv, D], mask [B, 1, 1, Nk] -> [B, Nq, H * D]."""
        out = tagged_dispatch(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return out.flatten(2, 3).to(q.dtype)

    def __reduce__(self) -> Any:
        # A copy or a pickle of the model is a plain model: it gets diffusers' processor back.
        return same, (self._residua_original,)


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


def heads_of(attn: Any, *parts: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(2, (attn.heads, -1)) for x in parts)  # [B, N, H, D]


def normed(norm: Any, x: Tensor) -> Tensor:
    """Applies the norm of queries or keys if the model has one."""
    return x if norm is None else norm(x)


def project_text(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the text in joint attention with projections for it.  # [B, N, H, D]"""
    q, k, v = heads_of(attn, attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x))
    return normed(attn.norm_added_q, q), normed(attn.norm_added_k, k), v


def project_out(attn: Any, x: Tensor) -> Tensor:
    return attn.to_out[1](attn.to_out[0](x))

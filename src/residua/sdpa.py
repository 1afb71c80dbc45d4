"""Residua behind the signature of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor

from .attention import attention
from .config import Config
from .errors import InputError
from .inputs import key_padding
from .state import State


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: Config | None = None,
    state: State | None = None,
) -> Tensor:
    """Sparse attention for code that calls torch's function; raises for arguments that it does not support.

    Args:
        query: [B, H, Nq, D].
        key: [B, Hkv, Nk, D].
        value: [B, Hkv, Nk, Dv].
        attn_mask: None, or key padding: bool [B, Nk], [B, 1, 1, Nk] or [1, 1, 1, Nk], True at real keys.
        dropout_p: Must be 0: this is inference only.
        is_causal: Must be False: causal attention is not approximated.
        scale: Factor of the scores; None: 1 / sqrt(D).
        enable_gqa: Whether H may be a multiple of Hkv.
        config: How the call is approximated; None: `Config()`.
        state: Warm start from the step before; one for each layer and guidance branch.

    Returns:
        The output [B, H, Nq, Dv] in query's dtype.

    >>> out = residua.sdpa(q, k, v)
    """
    if dropout_p:
        raise InputError(f"dropout_p={dropout_p}: this is inference only; leave dropout out")
    if is_causal:
        raise InputError("is_causal=True: causal attention is not approximated; call torch's function for it")
    if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
        raise InputError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True, as for torch"
        )
    mask = None if attn_mask is None else _key_padding(attn_mask, query.shape[0], key.shape[2])
    return attention(query, key, value, config, state, key_mask=mask, scale=scale)


def _key_padding(mask: Tensor, batch: int, keys: int) -> Tensor:
    """The mask as [B, Nk] bool; refuses a mask that differs between heads or queries."""
    wanted = f"wanted key padding as bool [B, Nk] or [B, 1, 1, Nk] with B = {batch}, Nk = {keys}"
    found = key_padding(mask, batch)
    if found is None or found.shape[1] != keys:
        raise InputError(f"attn_mask is {mask.dtype} {list(mask.shape)}: {wanted}; others stay with torch's")
    return found

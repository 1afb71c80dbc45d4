"""How an attention call of diffusers finds its layer.

A processor of diffusers ends in `dispatch_attention_fn(q, k, v, ..., backend=self._attention_backend)`.
Residua puts a `LayerTag` there and rebinds that name, in the module of the processor, to `tagged_dispatch`. A
call without a tag goes to diffusers unchanged. A call with one enters the operator
`residua::diffusers_attention`, which is opaque to torch.compile and finds the layer by a tensor: a plain
number would be a constant, and every layer would need its own graph.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import InputError, IntegrationError

if TYPE_CHECKING:
    from .layer import AttentionLayer

MORE_ARGUMENTS = "dropout or attention_kwargs"
BLOCK_MASK = "block mask"  # flex attention: the model itself says which blocks are computed
INTERCEPTED = "attention is replaced by a torch function mode"  # perturbed attention guidance of diffusers

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, AttentionLayer] = weakref.WeakValueDictionary()


class LayerTag(str):
    """Takes the place of a backend's name in a processor. As a string it equals that name, so that diffusers'
    own checks (enable_parallelism) still find the dense backend."""

    layer: AttentionLayer
    number: Tensor  # the layer's index in the table of all tagged layers

    def __new__(cls, layer: AttentionLayer, backend: str) -> LayerTag:
        tag = super().__new__(cls, backend)
        number = next(_numbers)
        tag.layer, tag.number = layer, torch.tensor(number, device="cpu")  # reading it never waits
        _layers[number] = layer
        return tag

    def __reduce__(self) -> Any:
        # A copy or a pickle of the model is a plain model: it gets the user's dense backend back.
        return same, (self.layer.backend,)


def same(x: Any) -> Any:
    """What takes our place in a copy or pickle of the model; `__reduce__` needs a function that has a name."""
    return x


def tagged_dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Tensor:
    """Replaces diffusers' `dispatch_attention_fn`, with the same signature; tensors are [B, N, H, D]."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs)
    if not isinstance(backend, LayerTag):
        return dispatch_attention_fn(*given, backend=backend, parallel_config=parallel_config)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise InputError("residua.accelerate is for inference; run the model under torch.no_grad(), or remove()")
    why = None
    if dropout_p or attention_kwargs:
        why = MORE_ARGUMENTS
        if not backend.layer.now.family.generic:
            raise IntegrationError(
                f"got dropout_p={dropout_p}, attention_kwargs={attention_kwargs!r} in a self-attention call; "
                "Residua takes neither: remove() it for this model"
            )
    elif attn_mask is not None and not isinstance(attn_mask, Tensor):
        why = BLOCK_MASK
    elif _intercepted():
        why = INTERCEPTED
    if why is not None:
        return backend.layer.leave_dense(given, why)
    number = backend.number
    if parallel_config is None or parallel_config.context_parallel_config is None:
        return attention_op(query, key, value, number, attn_mask, scale, is_causal)
    return _context_parallel(query, key, value, number, attn_mask, scale, is_causal, parallel_config)


def _intercepted() -> bool:
    """Whether a hook of diffusers stands in for torch's attention (`LayerSkipConfig.skip_attention_scores`):
    it would not see a call that never reaches torch."""
    if torch.compiler.is_compiling():
        return False  # not traceable
    return any(
        type(mode).__name__ == "AttentionScoreSkipFunctionMode"
        for mode in torch.overrides._get_current_function_mode_stack()
    )


def _context_parallel(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, mask: Tensor | None, scale: float | None, causal: bool, config: Any
) -> Tensor:
    """Ulysses: diffusers exchanges tokens for heads around `forward`, which sees every token of a few
    heads."""
    from diffusers.models import attention_dispatch

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any, **more: Any) -> Tensor:
        return attention_op(q, k, v, number, mask, scale, causal)

    return attention_dispatch._templated_context_parallel_attention(
        q, k, v, mask, 0.0, causal, scale, False, False, forward_op=forward, backward_op=None, _parallel_config=config
    )


# Never part of a CUDA graph: the body keeps state and decides again at each step.
@torch.library.custom_op("residua::diffusers_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, mask: Tensor | None, scale: float | None, causal: bool
) -> Tensor:
    layer = _layers.get(int(number))
    if layer is None:
        raise IntegrationError("this layer's acceleration is gone; call accelerate() again on the model")
    if layer.perturbed and layer.now.active and not _intercepted():
        # Only a compiled graph comes here: it does not contain the function mode of the hook.
        raise IntegrationError(
            f"{layer.name}: perturbed attention guidance (skip_attention_scores) in a compiled transformer, "
            "where Residua would ignore it; do not compile it, or remove() Residua"
        )
    return layer.run(q, k, v, mask, scale, causal).to(q.dtype).contiguous()


@attention_op.register_fake
def _attention_shape(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, mask: Tensor | None, scale: float | None, causal: bool
) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


_rebound: dict[str, int] = {}  # module name -> how many attachments use it
_lock = threading.Lock()


def rebind(module: ModuleType) -> None:
    """Makes the processors of a diffusers module call `tagged_dispatch`; counted, so that two models can
    share it."""
    with _lock:
        if not _rebound.get(module.__name__):
            from diffusers.models.attention_dispatch import dispatch_attention_fn

            if getattr(module, "dispatch_attention_fn", None) is not dispatch_attention_fn:
                raise IntegrationError(
                    f"{module.__name__}.dispatch_attention_fn is missing or was replaced by another package; "
                    "undo that replacement first"
                )
            module.dispatch_attention_fn = tagged_dispatch  # type: ignore[attr-defined]
        _rebound[module.__name__] = _rebound.get(module.__name__, 0) + 1


def unbind(module: ModuleType) -> None:
    with _lock:
        _rebound[module.__name__] -= 1
        if _rebound[module.__name__] == 0:
            from diffusers.models.attention_dispatch import dispatch_attention_fn

            del _rebound[module.__name__]
            module.dispatch_attention_fn = dispatch_attention_fn  # type: ignore[attr-defined]

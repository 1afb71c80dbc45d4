"""Tags the attention processors of an accelerated transformer and restores them."""

import sys
from dataclasses import dataclass
from typing import Any

from ...errors import IntegrationError
from .dispatch import LayerTag, rebind, unbind
from .layer import AttentionLayer


@dataclass(eq=False)
class TaggedProcessor:
    """The processor of one self-attention module. We tag a copy, because diffusers may share one processor
    between layers, cross-attention included; only a processor with weights is tagged itself."""

    module: Any
    layer: AttentionLayer
    original: Any = None
    mine: Any = None
    _rebound: Any = None  # the processor's module while its dispatch is rebound

    def install(self) -> None:
        found = self.module.processor
        # After unfuse_qkv_projections, diffusers restores a processor that was ours before.
        original = getattr(found, "_residua_original", found)
        family, name = self.layer.now.family, type(original).__name__
        mine = family.processor(name, original)
        if mine is None:
            wanted = " or ".join(family.processors) or "one that calls the dispatcher of diffusers"
            raise IntegrationError(
                f"{self.layer.name}: its attention processor is {name}, wanted {wanted}; restore the "
                "processor of diffusers, or register a family that knows yours (docs/add-a-model.md)"
            )
        if type(mine) is type(original) and self._rebound is None:
            module = sys.modules[type(original).__module__]
            rebind(module)
            self._rebound = module
        backend = getattr(found, "_attention_backend", None)
        self.layer.backend = backend.layer.backend if isinstance(backend, LayerTag) else backend
        if mine is not original:
            mine._residua_original = original
        elif isinstance(backend, LayerTag) and backend.layer is not self.layer and backend.layer.now.active:
            raise IntegrationError(
                f"{self.layer.name}: shares a processor with weights ({name}) with {backend.layer.name}; "
                "wanted one for each layer"
            )
        mine._parallel_config = getattr(found, "_parallel_config", None)
        mine._attention_backend = LayerTag(self.layer, _backend_name(self.layer.backend))
        self.original, self.mine, self.module.processor = original, mine, mine

    def refresh(self) -> None:
        """Follows calls of set_attention_backend, set_attn_processor, fuse_qkv_projections and
        apply_layer_skip."""
        if self.module.processor is not self.mine:
            self.install()
        backend = self.mine._attention_backend
        if not isinstance(backend, LayerTag):
            self.layer.backend = backend
            self.mine._attention_backend = LayerTag(self.layer, _backend_name(backend))
        hooks = getattr(getattr(self.module, "_diffusers_hook", None), "hooks", {})
        self.layer.perturbed = any(getattr(hook, "skip_attention_scores", False) for hook in hooks.values())

    def restore(self) -> None:
        if self.mine is None:
            return
        if self.module.processor is self.mine:
            self.module.processor = self.original
            self._carry_over()
        if self._rebound is not None:
            unbind(self._rebound)

    def _carry_over(self) -> None:
        """Keeps what the user set while Residua was attached."""
        backend = self.mine._attention_backend
        changed = {
            "_attention_backend": self.layer.backend if isinstance(backend, LayerTag) else backend,
            "_parallel_config": getattr(self.mine, "_parallel_config", None),
        }
        for name, value in changed.items():
            if hasattr(self.original, name) and getattr(self.original, name) is not value:
                setattr(self.original, name, value)


def _backend_name(backend: Any) -> str:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    chosen = _AttentionBackendRegistry._active_backend if backend is None else backend
    return str(getattr(chosen, "value", chosen))

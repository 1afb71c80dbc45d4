"""A transformer that no family knows: what its attention calls show must be enough. Not registered; it is
used with `accelerate(..., generic=True)` only."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import IntegrationError
from ...integration import Grid, Preset
from ...integration.site import Ranges
from .base import Family

CROSS = "not self-attention"
TEXT = ("encoder_hidden_states", "encoder_hidden_states_t5", "context")
# Sparse by themselves: every call that matters carries a block mask of flex attention.
BLOCK_MASKS = (
    "AnyFlowFARTransformer3DModel", "Kandinsky6SRTransformer3DModel", "WanAnimate2Transformer3DModel",
)  # fmt: skip
TIMES = ("timestep", "timesteps", "t", "sigma")


class Generic(Family):
    """Every attention that diffusers dispatches. Nothing says where text stands in a joint sequence, so as
    many tokens as the text has are exact and kept at both ends."""

    name = "generic"
    models = ()
    attention = ".*"
    preset = Preset(0.22, 0.20, 0.03, "no family knows this model; taken over from Wan2.2")
    processors: Mapping[str, Any] = {}
    generic = True

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        raise NotImplementedError("nothing says the grid of a model that no family knows")

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        return 0  # told by each call

    def layout(self, model: Any, inputs: Mapping[str, Any]) -> int:
        """How many text tokens there are."""
        found = [inputs[name] for name in TEXT if inputs.get(name) is not None]
        items = [item for text in found for item in (text if isinstance(text, (list, tuple)) else [text])]
        return sum(int(item.shape[-2]) for item in items if getattr(item, "ndim", 0) >= 2)

    def text(self, queries: int, keys: int, video: int, layout: int) -> tuple[Ranges, Ranges]:
        text = layout
        if not text:
            return (), ()
        if 2 * text >= queries:  # mostly text: nothing is left to route
            return ((0, queries),), ((0, keys),)
        ends = ((0, text), (queries - text, queries))
        return ends, ends

    def why_dense(self, queries: int, keys: int) -> str | None:
        return None if queries == keys else CROSS

    def processor(self, name: str, original: Any) -> Any:
        return copy.copy(original) if dispatches(original) else None

    def timestep(self, inputs: Mapping[str, Any]) -> Any:
        return next((inputs[name] for name in TIMES if inputs.get(name) is not None), None)

    def layers(self, model: Any) -> Iterator[tuple[str, Any]]:
        if type(model).__name__ in BLOCK_MASKS:
            raise IntegrationError(
                f"{type(model).__name__}: it computes through block masks of its own, wanted a model with "
                "dense attention; there is nothing to make sparse"
            )
        for name, module in model.named_modules():
            if dispatches(getattr(module, "processor", None)):
                yield name, module


def dispatches(processor: Any) -> bool:
    """Whether a processor hands its backend to the dispatcher of diffusers."""
    processor = getattr(processor, "_residua_original", processor)
    module = sys.modules.get(type(processor).__module__)
    return hasattr(processor, "_attention_backend") and hasattr(module, "dispatch_attention_fn")

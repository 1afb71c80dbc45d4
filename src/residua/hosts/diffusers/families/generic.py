"""A transformer that no family knows: Residua relies on what its attention calls show. Not registered; only
used with `accelerate(..., generic=True)`."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ....errors import IntegrationError
from ... import Preset
from ...site import Ranges
from .base import Family, taggable

CROSS = "not self-attention"
TEXT = ("encoder_hidden_states", "encoder_hidden_states_2", "encoder_hidden_states_t5", "text_bth", "context")
# Already sparse: every call that matters has a block mask of flex attention.
BLOCK_MASKS = ("AnyFlowFARTransformer3DModel", "Kandinsky6SRTransformer3DModel", "WanAnimate2Transformer3DModel")
TIMES = ("timestep", "timesteps", "t", "sigma")


class Generic(Family):
    """Every attention that diffusers dispatches. It is unknown where the text is in a joint sequence, so at
    both ends as many tokens as the text has are exact and kept."""

    name = "generic"
    models = ()
    preset = Preset(0.22, 0.20, 0.03, "no family knows this model; taken over from Wan2.2")
    processors: Mapping[str, Any] = {}
    generic = True

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        return 0  # each call tells

    def layout(self, model: Any, inputs: Mapping[str, Any]) -> int:
        """How many text tokens there are."""
        found = [inputs[name] for name in TEXT if inputs.get(name) is not None]
        items = [item for text in found for item in (text if isinstance(text, (list, tuple)) else [text])]
        # [text, C], [B, text, C], or with layers of the text encoder: [B, text, layers, C] or the other
        # way round. There are fewer layers than tokens in all but the shortest texts.
        shapes = [item.shape for item in items if getattr(item, "ndim", 0) >= 2]
        return sum(max(shape[:1] if len(shape) == 2 else shape[1:-1]) for shape in shapes)

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
        return taggable(original) if dispatches(original) else None

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
    """Whether a processor, or a class of processors, passes its backend to the dispatcher of diffusers."""
    processor = getattr(processor, "_residua_original", processor)
    kind = processor if isinstance(processor, type) else type(processor)
    module = sys.modules.get(kind.__module__)
    return hasattr(processor, "_attention_backend") and hasattr(module, "dispatch_attention_fn")


def reachable(model: Any) -> bool:
    """Whether any attention of a model goes through the dispatcher of diffusers."""
    return type(model).__name__ not in BLOCK_MASKS and any(
        dispatches(getattr(module, "processor", None)) for module in model.modules()
    )

"""Finds the models of a pipeline whose self-attention Residua can make sparse."""

from collections.abc import Iterator
from typing import Any

import torch

from ...errors import IntegrationError
from .families import find_family, supported
from .families.generic import reachable

COMPONENTS = ("transformer", "transformer_2")
BESIDE = ("controlnet", "transformer_ref", "unconditional_transformer")  # attached if Residua can


def transformers_of(target: Any, generic: bool = False) -> dict[str, Any]:
    """The transformers of a pipeline by component name; a single model is called "transformer".

    Args:
        target: A pipeline or a model.
        generic: Whether components beside the transformer count that no family knows.
    """
    if isinstance(target, torch.nn.Module):
        return {"transformer": unwrap(target)}
    held = _components(target)
    found: dict[str, Any] = {}
    for name in COMPONENTS:
        model = unwrap(held.get(name))
        if model is not None and model not in found.values():
            found[name] = model
    if not found:
        raise IntegrationError(
            f"{type(target).__name__}: got neither a transformer nor a pipeline with a component named "
            f"{' or '.join(COMPONENTS)}; supported transformers: {', '.join(sorted(supported()))}"
        )
    for name, model in _beside(held):
        if model not in found.values() and (find_family(model) is not None or (generic and reachable(model))):
            found[name] = model
    return found


def models_beside(target: Any) -> dict[str, Any]:
    """Models that run beside the transformer of a pipeline, whether or not Residua knows them."""
    return {} if isinstance(target, torch.nn.Module) else dict(_beside(_components(target)))


def unwrap(model: Any) -> Any:
    """The model inside the wrappers of torch.compile and peft."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        return unwrap(model.get_base_model())
    return model


def _components(target: Any) -> dict[str, Any]:
    components = getattr(target, "components", None)
    if isinstance(components, dict):
        return components
    return {name: getattr(target, name, None) for name in COMPONENTS}


def _beside(held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in BESIDE:
        model = unwrap(held.get(name))
        nets = getattr(model, "nets", None)  # several ControlNets in one
        if isinstance(nets, torch.nn.ModuleList):
            yield from ((f"{name}.{number}", unwrap(net)) for number, net in enumerate(nets))
        elif isinstance(model, torch.nn.Module):
            yield name, model

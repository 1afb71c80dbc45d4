"""Which pipelines of the installed diffusers Residua supports: `python -m residua.diffusers.coverage`."""

from __future__ import annotations

import inspect
import sys
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .accelerate import COMPONENTS
from .families import supported
from .families.generic import BLOCK_MASKS
from .versions import require_diffusers


@dataclass(frozen=True)
class Coverage:
    """One transformer class, the pipelines that use it, and how Residua supports it."""

    model: str
    pipelines: tuple[str, ...]
    how: str  # "supported", "generic" or "not"
    why: str


def coverage() -> list[Coverage]:
    """Every transformer that a pipeline of the installed diffusers uses."""
    pipelines: dict[type, set[str]] = {}
    for name, model in _transformers():
        pipelines.setdefault(model, set()).add(name)
    rows = [
        Coverage(model.__name__, tuple(sorted(names)), *_how(model)) for model, names in pipelines.items()
    ]
    order = ("supported", "generic", "not")
    return sorted(rows, key=lambda row: (order.index(row.how), row.model))


def table() -> str:
    """The coverage as a table in Markdown."""
    lines = ["| transformer | Residua | pipelines |", "|---|---|---|"]
    for row in coverage():
        names = ", ".join(name.removesuffix("Pipeline") for name in row.pipelines)
        lines.append(f"| `{row.model}` | {row.why} | {names} |")
    return "\n".join(lines)


def _how(model: type) -> tuple[str, str]:
    family = supported().get(model.__name__)
    if family is not None:
        return "supported", f"**{family.name}**"
    if model.__name__ in BLOCK_MASKS:
        return "not", "no: it computes through block masks of its own"
    module = sys.modules[model.__module__]
    if hasattr(module, "dispatch_attention_fn"):
        return "generic", "`generic=True`"
    return "not", "no: its attention does not go through the dispatcher"


def _transformers() -> Iterator[tuple[str, type]]:
    """Names of pipelines, each with the class of a transformer that it uses."""
    diffusers = require_diffusers()
    for name in sorted(dir(diffusers)):
        if not name.endswith("Pipeline"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                pipeline = getattr(diffusers, name)
            except (AttributeError, ImportError, RuntimeError):
                continue  # it needs a package that is not installed
        if not inspect.isclass(pipeline):
            continue
        parameters = inspect.signature(pipeline.__init__).parameters
        for component in COMPONENTS:
            if component in parameters:
                yield from ((name, model) for model in _classes(parameters[component].annotation, pipeline))


def _classes(annotation: Any, pipeline: type) -> Iterator[type]:
    """The model classes in an annotation, which may be a union, an optional or a name."""
    if isinstance(annotation, str):
        annotation = getattr(sys.modules[pipeline.__module__], annotation.split("|")[0].strip(" '\""), None)
    for found in typing.get_args(annotation) or (annotation,):
        if inspect.isclass(found) and hasattr(found, "load_config"):
            yield found


if __name__ == "__main__":
    print(table())

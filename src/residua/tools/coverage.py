"""Which pipelines of the installed diffusers Residua supports: `python -m residua.tools.coverage`."""

import inspect
import sys
import typing
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..hosts.diffusers.components import COMPONENTS
from ..hosts.diffusers.families import supported
from ..hosts.diffusers.families.generic import BLOCK_MASKS, dispatches
from ..hosts.diffusers.versions import require_diffusers

MODULAR = "modular: made of blocks; what counts is the class of the transformer it loads"
ABSENT = "needs a package that is not installed here"
PERTURBED = "no: it replaces attention processors by its own (perturbed attention guidance)"
LISTS = "no: it gives the transformer several pictures per sample"
REFUSED = {
    "StableDiffusion3PAGImg2ImgPipeline": PERTURBED,
    "StableDiffusion3PAGPipeline": PERTURBED,
    "ZImageOmniPipeline": LISTS,
}  # although a family knows the transformer
OTHER = "no: a UNet, or another model that is no transformer over video or image tokens"


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
        if name in REFUSED:
            continue
        pipelines.setdefault(model, set()).add(name)
    rows = [Coverage(model.__name__, tuple(sorted(names)), *_how(model)) for model, names in pipelines.items()]
    order = ("supported", "generic", "not")
    return sorted(rows, key=lambda row: (order.index(row.how), row.model))


def table() -> str:
    """The coverage as a table in Markdown."""
    lines = ["| transformer | Residua | pipelines |", "|---|---|---|"]
    for row in coverage():
        lines.append(f"| `{row.model}` | {row.why} | {_short(row.pipelines)} |")
    return "\n".join(lines)


def rest() -> dict[str, tuple[str, ...]]:
    """The pipelines that name no transformer, by reason."""
    covered = {name for row in coverage() for name in row.pipelines}
    found: dict[str, list[str]] = {MODULAR: [], ABSENT: [], PERTURBED: [], LISTS: [], OTHER: []}
    base = require_diffusers().ModularPipeline
    for name, pipeline in _pipelines():
        if name not in (*covered, "DiffusionPipeline", "ModularPipeline"):
            modular, absent = issubclass(pipeline, base), hasattr(pipeline, "_backends")
            found[MODULAR if modular else ABSENT if absent else REFUSED.get(name, OTHER)].append(name)
    return {reason: tuple(names) for reason, names in found.items()}


def rest_table() -> str:
    """The same as a table in Markdown."""
    lines = ["| Residua | pipelines |", "|---|---|"]
    return "\n".join([*lines, *(f"| {reason} | {_short(names)} |" for reason, names in rest().items())])


def _short(names: Iterable[str]) -> str:
    return ", ".join(name.removesuffix("Pipeline") for name in names)


def _how(model: type) -> tuple[str, str]:
    family = supported().get(model.__name__)
    if family is not None:
        return "supported", f"**{family.name}**"
    if model.__name__ in BLOCK_MASKS:
        return "not", "no: it computes through block masks of its own"
    # Some take their processors from the module of another model (Chroma: from Flux).
    named = vars(sys.modules[model.__module__]).values()
    if any(inspect.isclass(item) and dispatches(item) for item in named):
        return "generic", "`generic=True`"
    return "not", "no: its attention does not go through the dispatcher"


def _pipelines() -> Iterator[tuple[str, Any]]:
    """Names and classes."""
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
        if inspect.isclass(pipeline):
            yield name, pipeline


def _transformers() -> Iterator[tuple[str, type]]:
    """Names of pipelines, each with the class of a transformer that it uses."""
    for name, pipeline in _pipelines():
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
    print(table(), rest_table(), sep="\n\n")

"""Residua for diffusers: one call accelerates the self-attention of a video pipeline.

>>> handle = residua.accelerate(pipe, quality="balanced")   # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..config import Config
from ..errors import InputError, IntegrationError
from .families import Family, Grid, Preset, family_of, patched_grid, register, supported
from .handle import Handle, unwrap
from .quality import QUALITIES, Quality
from .report import Report
from .versions import require_diffusers

COMPONENTS = ("transformer", "transformer_2")

__all__ = [
    "QUALITIES", "Family", "Grid", "Handle", "Preset", "Quality", "Report", "accelerate", "attached",
    "patched_grid", "preset_config", "register", "supported",
]  # fmt: skip


def accelerate(
    target: Any,
    density: float | None = None,
    *,
    quality: str | None = None,
    config: Config | None = None,
    dense_steps: float | None = None,
    dense_layers: float | None = None,
    layers: Sequence[int | str] | None = None,
    min_tokens: int | None = None,
    scheduler: Any = None,
    steps: int | None = None,
    replace: bool = False,
    profile: bool = False,
) -> Handle:
    """Makes the self-attention of a diffusers pipeline, or of one transformer, sparse.

    Say how close it must stay to dense with `quality` ("faithful", "balanced" or "fast"), or what it may cost
    with `density`, or everything with `config`. What is not given comes from the preset of the model family.
    `dense_steps` and `dense_layers` keep the first ones dense: a whole number counts them, a fraction is a
    share (1 is one step, 1.0 all of them).
    `layers` limits the sparse layers to these numbers or names; `min_tokens` keeps calls with fewer video
    tokens dense. For a transformer without its pipeline, `scheduler` or `steps` says how long a run is. A
    model that is accelerated already is an error unless `replace` is given. `profile` adds the time of every
    stage to the report; on CUDA each stage then waits for the device.
    """
    require_diffusers()
    from .attach import Attachment
    from .settings import settle

    models = _transformers(target)
    wanted = [
        settle(
            family_of(model).preset, density, config, dense_steps, dense_layers, layers, min_tokens, quality
        )
        for model in models.values()
    ]
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InputError(f"steps={steps!r}: wanted the number of denoising steps of a run, or None")
    _release(target, replace)

    def current_scheduler() -> Any:
        return scheduler if scheduler is not None else getattr(target, "scheduler", None)

    attachments: list[Attachment] = []
    try:
        for (name, model), settings in zip(models.items(), wanted, strict=True):
            attachments.append(Attachment(name, model, settings, current_scheduler, steps, profile))
    except BaseException:
        for attachment in attachments:
            attachment.detach()
        raise
    return Handle(target, attachments)


def attached(target: Any) -> Handle | None:
    """A handle on what is accelerated in a pipeline or transformer at this moment, or None."""
    from .attach import attachment_of

    found = [attachment_of(model) for model in _transformers(target).values()]
    present = [attachment for attachment in found if attachment is not None]
    return Handle(target, present) if present else None


def preset_config(target: Any) -> Config:
    """The config that `accelerate` takes if none is given, to change some of it."""
    return Config(density=family_of(next(iter(_transformers(target).values()))).preset.density)


def _release(target: Any, replace: bool) -> None:
    """Makes room for a new acceleration, or says that there is one."""
    old = attached(target)
    if old is None:
        return
    if not replace:
        raise IntegrationError(
            f"{', '.join(item.name for item in old.attachments)} is accelerated already; call remove() on "
            "its handle (residua.diffusers.attached(pipe) finds it), or pass replace=True"
        )
    old.remove()


def _transformers(target: Any) -> dict[str, Any]:
    """The transformers of a pipeline by component name; a model stands for itself."""
    if isinstance(target, torch.nn.Module):
        return {"transformer": unwrap(target)}
    components = getattr(target, "components", None)
    held = (
        components
        if isinstance(components, dict)
        else {name: getattr(target, name, None) for name in COMPONENTS}
    )
    found: dict[str, Any] = {}
    for name in COMPONENTS:
        model = unwrap(held.get(name))
        if model is not None and not any(model is other for other in found.values()):
            found[name] = model
    if not found:
        raise IntegrationError(
            f"{type(target).__name__}: got neither a transformer nor a pipeline with a component named "
            f"{' or '.join(COMPONENTS)}; supported transformers: {', '.join(sorted(supported()))}"
        )
    return found

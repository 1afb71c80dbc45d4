"""`accelerate`: attaches Residua to the transformers of a diffusers pipeline."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ...config import Config
from ...errors import InputError, IntegrationError
from ...util.interrupts import uninterrupted
from .. import ModelFacts, Profile, Settings
from ..settings import CHECKS
from .attach import Attachment, attachment_of
from .components import transformers_of
from .families import Family, family_of, find_family
from .families.generic import Generic
from .handle import Handle
from .tracking import Offset
from .versions import require_diffusers


def accelerate(
    target: Any,
    density: float | None = None,
    *,
    quality: Literal["faithful", "balanced", "fast"] | None = None,
    config: Config | None = None,
    method: str | None = None,
    profile: str | Path | Profile | None = None,
    dense_steps: float | None = None,
    dense_layers: float | None = None,
    layers: Sequence[int | str] | None = None,
    min_tokens: int | None = None,
    scheduler: Any = None,
    steps: int | None = None,
    replace: bool = False,
    time_stages: bool = False,
    generic: bool = False,
) -> Handle:
    """Makes the self-attention of a diffusers pipeline, or of one transformer, sparse.

    The default is `quality="balanced"`. `config=Config.paper()` is the paper's method; the first steps and
    layers that the preset of the model family names then stay dense.

    Args:
        target: A diffusers pipeline, or one transformer.
        density: What it may cost, as a share of dense attention.
        quality: How close it must stay to dense: "faithful", "balanced" or "fast". Instead of `density`.
        config: All settings of the method; `density` overrides the config's.
        method: Another method instead of Residua's, to compare with: "paper", "svg2", "svoo", "svg-ear",
            "sparge" and others (`residua.baselines.methods.method_names()`). Its `simplified` says what it leaves out.
        profile: The file that `residua tune` wrote for this model, instead of a density, quality, config or
            method. A profile of another kind of transformer is refused.
        dense_steps: First steps that stay dense: a whole number is a count, a fraction a share (1 is one
            step, 1.0 all steps).
        dense_layers: First layers that stay dense, in the same form.
        layers: The only layers that may be sparse, by number or (wild-card) module name.
        min_tokens: Calls with fewer video tokens stay dense; None: depends on the device.
        scheduler: Only for a transformer without its pipeline: tells which step runs.
        steps: Only for a transformer without its pipeline: how many steps a run has.
        replace: Replaces an existing acceleration, which is an error otherwise.
        time_stages: Adds the time of every stage to the report; on CUDA each stage then waits for the device.
        generic: Also accepts transformers that no family knows: every dispatched self-attention without a
            mask, or with key padding. Needs an error bound (`quality`, or a config with `max_error`), because
            nobody has tested such a model.

    Returns:
        A handle with the report; its `remove()` restores the model.
    """
    others = {"density": density, "quality": quality, "config": config, "method": method}
    given = [f"{name}=" for name, value in others.items() if value is not None]
    if profile is not None and given:
        raise InputError(
            f"profile= together with {' and '.join(given)}: a profile sets the whole method; leave one of "
            "them out, or change its [residua] table"
        )
    asked = Settings(
        config=config,
        density=density,
        quality=quality,
        method=method,
        dense_steps=dense_steps,
        dense_layers=dense_layers,
        layers=layers,
        min_tokens=min_tokens,
    )
    if isinstance(profile, (str, Path, Profile)):
        tuned = profile if isinstance(profile, Profile) else Profile.from_toml(profile)
        tuned.check_model(model_facts(target, generic=generic), "the profile" if tuned is profile else str(profile))
        checks = {name: getattr(asked, name) for name in CHECKS if getattr(asked, name) is not None}
        asked = dataclasses.replace(tuned.settings, **checks)
    elif profile is not None:
        raise InputError(f"profile={profile!r}: wanted the path of a file that `residua tune` wrote")
    return accelerate_with(
        target, asked, scheduler=scheduler, steps=steps, replace=replace, time_stages=time_stages, generic=generic
    )


def accelerate_with(
    target: Any,
    asked: Settings,
    *,
    scheduler: Any = None,
    steps: int | None = None,
    replace: bool = False,
    time_stages: bool = False,
    generic: bool = False,
) -> Handle:
    """`accelerate` with settings that are one object; the other arguments are the same."""
    require_diffusers()
    models = transformers_of(target, generic)
    families = [_family(model, generic) for model in models.values()]
    wanted = [asked.resolve(family.preset) for family in families]
    for model, family, settings in zip(models.values(), families, wanted, strict=True):
        if family.generic and settings.config.max_error is None:
            raise InputError(
                f"generic=True for {type(model).__name__}, which no family knows: wanted an error bound; "
                "pass quality=, or config=Config(max_error=..., density=...)"
            )
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InputError(f"steps={steps!r}: wanted the number of denoising steps of a run, or None")
    _release(target, replace)

    def current_scheduler() -> Any:
        return scheduler if scheduler is not None else getattr(target, "scheduler", None)

    attachments: list[Attachment] = []
    offset = Offset()
    try:
        with uninterrupted():  # Ctrl-C comes after the last layer, and undoes all
            for (name, model), family, settings in zip(models.items(), families, wanted, strict=True):
                attachments.append(Attachment(name, model, family, settings, current_scheduler, steps, offset))
            for attachment in attachments:
                attachment.host.time_stages = time_stages
                attachment.siblings = tuple(other for other in attachments if other is not attachment)
            return Handle(target, attachments)
    except BaseException:
        with uninterrupted():
            for attachment in attachments:
                attachment.detach()
        raise


def attached(target: Any) -> Handle | None:
    """A handle on what is currently accelerated, for those who have lost theirs.

    Args:
        target: A pipeline or transformer.

    Returns:
        The handle; None if nothing is accelerated.
    """
    found = [attachment_of(model) for model in transformers_of(target, generic=True).values()]
    present = [attachment for attachment in found if attachment is not None]
    return Handle(target, present) if present else None


def preset_config(target: Any) -> Config:
    """The settings of a model's family, as a starting point for changes.

    Args:
        target: A pipeline or transformer.

    Returns:
        A Config with the density of the family.
    """
    return Config(density=family_of(next(iter(transformers_of(target).values()))).preset.density)


def model_facts(target: Any, name: str | None = None, generic: bool = False) -> ModelFacts:
    """What a profile stores about a pipeline or transformer in order to recognise it.

    Args:
        target: The pipeline or transformer.
        name: The user's name for it; None: its class.
        generic: As in `accelerate`.
    """
    models = transformers_of(target, generic).values()
    layers = sum(len(list(_family(model, generic).layers(model))) for model in models)
    dims = [
        getattr(model.config, field)
        for model in models
        for field in ("attention_head_dim", "head_dim")
        if isinstance(getattr(getattr(model, "config", None), field, None), int)
    ]
    classes = tuple(type(model).__name__ for model in models)
    return ModelFacts(name or type(target).__name__, classes, layers, dims[0] if dims else None)


def _family(model: Any, generic: bool) -> Family:
    return Generic() if generic and find_family(model) is None else family_of(model)


def _release(target: Any, replace: bool) -> None:
    """Removes an older acceleration, or raises if there is one and `replace` is False."""
    old = attached(target)
    if old is None:
        return
    if not replace:
        raise IntegrationError(
            f"{', '.join(item.name for item in old.attachments)} is accelerated already; call remove() on "
            "its handle (residua.hosts.diffusers.attached(pipe) finds it), or pass replace=True"
        )
    old.remove()

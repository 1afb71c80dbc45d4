"""Attaches Residua to one transformer, and removes it without a trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...errors import IntegrationError
from .. import HostAttention, ResolvedSettings
from .dispatch import same
from .families import Family, supported
from .layer import AttentionLayer, ForwardPass
from .processors import TaggedProcessor
from .tracking import Offset, Tracker

MARK = "_residua"


class Passenger:
    """An object of ours that is attached to the model. A copy or pickle of the model is a plain model;
    `__reduce__` says what takes the object's place in it."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment


class Mark(Passenger):
    def __reduce__(self) -> Any:
        return same, (None,)


class RootHook(Passenger):
    """Forward pre-hook of the transformer."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment)
        self._signature = inspect.signature(type(attachment.model).forward)

    @torch.compiler.disable
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.attachment.active:
            self.attachment.before_forward(self._signature.bind_partial(module, *args, **kwargs).arguments)

    def __reduce__(self) -> Any:
        return same, (_no_hook,)


class MethodWrap(Passenger):
    """Wraps a method of the model instance. Not a ModelHook of diffusers: that replaces `forward`, and
    removing it would undo an offload hook that was added later."""

    def __init__(self, attachment: Attachment, method: str) -> None:
        super().__init__(attachment)
        self.original = getattr(attachment.model, method)
        self.method = method

    @contextmanager
    def installed(self) -> Iterator[None]:
        model = self.attachment.model
        before = vars(model).get(self.method)
        setattr(model, self.method, self)
        yield
        # If somebody wrapped the method again, ours stays underneath and only passes calls on.
        if vars(model).get(self.method) is self:
            delattr(model, self.method)
            if before is not None:
                setattr(model, self.method, before)

    def __reduce__(self) -> Any:
        # While the copy is built it has no attributes of its own yet: this finds the method of its class.
        return getattr, (self.attachment.model, self.method)


class ContextWrap(MethodWrap):
    """Tells the tracker which guidance branch runs."""

    @contextmanager
    def __call__(self, name: str, **info: Any) -> Iterator[None]:
        attachment = self.attachment
        with self.original(name, **info):
            attachment.tracker.enter(name, info)
            try:
                yield
            except BaseException:
                attachment.forget()
                raise
            finally:
                attachment.tracker.leave()


class ResetWrap(MethodWrap):
    """Pipelines reset stateful caches when a run ends: this drops our groups as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.attachment.forget()
        return self.original(*args, **kwargs)


class Attachment:
    """Everything that `accelerate` put on one transformer."""

    def __init__(
        self,
        name: str,
        model: Any,
        family: Family,
        settings: ResolvedSettings,
        scheduler: Callable[[], Any],
        steps: int | None,
        offset: Offset,
    ) -> None:
        self.name = name
        self.model = model
        self.family = family
        self.tracker = Tracker(scheduler, steps, offset)
        self.now = ForwardPass(self.family, self.tracker)
        modules = self._find_layers()
        names = list(modules)
        depths = [self.family.depth(model, layer, index) for index, layer in enumerate(names)]
        self.host = HostAttention(
            settings,
            layers=names,
            depths=depths,
            name=name,
            model=type(model).__name__,
            family=self.family.name,
            preset=self.family.preset.source,
            unsupported="dense" if family.generic else "stop",
            lend=True,
        )
        self.siblings: tuple[Attachment, ...] = ()  # the other transformers of the pipeline
        self.layers = [
            AttentionLayer(self.host, self.now, index, layer, depth)
            for index, (layer, depth) in enumerate(zip(names, depths, strict=True))
        ]
        self._processors: list[TaggedProcessor] = []
        self._undo = ExitStack()
        try:
            self._attach(modules)
        except BaseException:
            self._undo.close()
            raise

    @property
    def active(self) -> bool:
        return self.now.active

    def _find_layers(self) -> dict[str, Any]:
        check_parallel(self.model, self.family)
        found = dict(self.family.layers(self.model))
        if not found and self.family.generic:
            raise IntegrationError(
                f"{type(self.model).__name__}: none of its attention goes through the dispatcher of diffusers, so "
                "generic=True cannot reach it; docs/add-a-model.md: how to add a family"
            )
        if not found:
            raise IntegrationError(
                f"{type(self.model).__name__}: no module is called {self.family.attention!r}; this version of "
                "diffusers builds the model differently: please report it"
            )
        return found

    def _attach(self, modules: dict[str, Any]) -> None:
        for layer in self.layers:
            processor = TaggedProcessor(modules[layer.name], layer)
            self._undo.callback(processor.restore)
            processor.install()
            self._processors.append(processor)
        self._undo.callback(self.model.register_forward_pre_hook(RootHook(self), with_kwargs=True).remove)
        for method, wrap in (("cache_context", ContextWrap), ("_reset_stateful_cache", ResetWrap)):
            if hasattr(self.model, method):
                self._undo.enter_context(wrap(self, method).installed())
        setattr(self.model, MARK, Mark(self))
        self._undo.callback(delattr, self.model, MARK)

    def before_forward(self, inputs: dict[str, Any]) -> None:
        """Called before each forward pass of the transformer, with its arguments by name."""
        check_parallel(self.model, self.family)
        for processor in self._processors:
            processor.refresh()
        self.tracker.advance(self.family.timestep(inputs))
        self.host.lenders = tuple(
            other.host
            for other in self.siblings
            if type(other.model) is type(self.model) and other.tracker.in_run_of(self.tracker)
        )
        self.now.video = self.family.tokens(self.model, inputs)
        self.now.layout = self.family.layout(self.model, inputs)
        self.now.elsewhere = False
        for other in self.siblings:
            other.now.elsewhere = True
        self.now.place = self.tracker.place(None if self.family.generic else self.family.grid(self.model, inputs))

    def forget(self) -> None:
        """Drops what is carried between steps; the next forward pass begins a new run."""
        self.tracker.forget()
        self.now.place = None
        self.host.reset()

    def detach(self) -> None:
        """Restores the transformer."""
        self.forget()
        self.now.active = False
        self._undo.close()


def attachment_of(model: Any) -> Attachment | None:
    mark = getattr(model, MARK, None)
    return mark.attachment if isinstance(mark, Mark) else None


def check_parallel(model: Any, family: Family) -> None:
    config = getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None)
    if config is None:
        return
    if (config.ring_degree or 1) > 1:
        raise IntegrationError(
            f"context parallelism with ring_degree={config.ring_degree}: sparse attention needs every key of "
            "a head, and Ring spreads them; use ContextParallelConfig(ulysses_degree=...)"
        )
    if not family.context_parallel:
        able = ", ".join(sorted({known.name for known in supported().values() if known.context_parallel}))
        raise IntegrationError(
            f"context parallelism is not supported for {family.name}, only for {able}; run it on one device, "
            "or remove() Residua"
        )


def _no_hook(*args: Any, **kwargs: Any) -> None:
    return None

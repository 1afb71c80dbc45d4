"""Attaches Residua to one transformer, and removes it without a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ...errors import IntegrationError
from .. import HostAttention, ResolvedSettings
from .families import Family, supported
from .hooks import ContextWrap, Mark, ResetWrap, RootHook, wrapped
from .layer import AttentionLayer, ForwardPass
from .processors import TaggedProcessor
from .tracking import Offset, Tracker

MARK = "_residua"


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
                self._undo.enter_context(wrapped(self.model, method, wrap(self, getattr(self.model, method), method)))
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

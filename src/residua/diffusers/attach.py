"""Puts Residua on one transformer, and takes it off again without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from ..errors import IntegrationError
from .families import Family, family_of, supported
from .hooks import ContextWrap, Mark, ResetWrap, RootHook, hooked, wrapped
from .layer import Layer, Site
from .settings import Settings, chosen_layers, part_of
from .slots import Slot
from .tracking import Tracker

MARK = "_residua"


class Attachment:
    """Everything that `accelerate` put on one transformer."""

    def __init__(
        self,
        name: str,
        model: Any,
        settings: Settings,
        scheduler: Callable[[], Any],
        steps: int | None,
        profile: bool = False,
    ) -> None:
        self.name = name
        self.model = model
        self.family = family_of(model)
        self.tracker = Tracker(scheduler, self._new_run, steps)
        self.site = Site(self.family, settings, self.tracker, profile=profile)
        self.slots: list[Slot] = []
        self._undo = ExitStack()
        try:
            self._attach()
        except BaseException:
            self._undo.close()
            raise

    @property
    def layers(self) -> list[Layer]:
        return [slot.layer for slot in self.slots]

    def _attach(self) -> None:
        check_parallel(self.model, self.family)
        found = list(self.family.layers(self.model))
        if not found:
            raise IntegrationError(
                f"{type(self.model).__name__}: no module is called {self.family.attention!r}; this version "
                "of diffusers builds the model differently: please report it"
            )
        for layer, module in zip(self._make_layers(found), (module for _, module in found), strict=True):
            slot = Slot(module, layer)
            self._undo.callback(slot.restore)
            slot.install()
            self.slots.append(slot)
        self._undo.enter_context(hooked(self.model, RootHook(self)))
        for method, wrap in (("cache_context", ContextWrap), ("_reset_stateful_cache", ResetWrap)):
            if hasattr(self.model, method):
                self._undo.enter_context(
                    wrapped(self.model, method, wrap(self, getattr(self.model, method), method))
                )
        setattr(self.model, MARK, Mark(self))
        self._undo.callback(delattr, self.model, MARK)

    def _make_layers(self, found: list[tuple[str, Any]]) -> Iterator[Layer]:
        names = [name for name, _ in found]
        depths = [self.family.depth(self.model, name, index) for index, name in enumerate(names)]
        dense = part_of(self.site.settings.dense_layers, max(depths) + 1)
        chosen = chosen_layers(self.site.settings.layers, names)
        for index, name in enumerate(names):
            yield Layer(self.site, index, name, first=depths[index] < dense, selected=index in chosen)

    def before_forward(self, inputs: dict[str, Any]) -> None:
        check_parallel(self.model, self.family)
        for slot in self.slots:
            slot.refresh()
        self.tracker.advance(self.family.timestep(inputs))
        site = self.site
        site.video, site.grid = self.family.tokens(self.model, inputs), self.family.grid(self.model, inputs)
        site.grids.add(site.grid)

    def _new_run(self) -> None:
        for layer in self.layers:
            layer.forget()
            layer.log.settle()

    def forget(self) -> None:
        """Drops the centres; the next forward pass begins a new run."""
        self.tracker.forget()
        for layer in self.layers:
            layer.forget()

    def detach(self) -> None:
        self.forget()
        self.site.active = False
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
        raise IntegrationError(
            f"context parallelism is not supported for {family.name}, only for {_parallel_families()}; run "
            "it on one device, or remove() Residua"
        )


def _parallel_families() -> str:
    return ", ".join(sorted({known.name for known in supported().values() if known.context_parallel}))

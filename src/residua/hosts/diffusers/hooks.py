"""What is attached to an accelerated transformer besides its processors: a forward pre-hook, two wrapped
methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .dispatch import same

if TYPE_CHECKING:
    from .attach import Attachment


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

    def __init__(self, attachment: Attachment, original: Callable[..., Any], method: str) -> None:
        super().__init__(attachment)
        self.original = original
        self.method = method

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


@contextmanager
def wrapped(model: Any, method: str, wrap: MethodWrap) -> Iterator[None]:
    before = vars(model).get(method)
    setattr(model, method, wrap)
    yield
    # If somebody wrapped the method again, ours stays underneath and only passes calls on.
    if vars(model).get(method) is wrap:
        delattr(model, method)
        if before is not None:
            setattr(model, method, before)


def _no_hook(*args: Any, **kwargs: Any) -> None:
    return None

"""What `accelerate` returns: the report, and `remove()` to restore the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...util.interrupts import uninterrupted
from .. import Report, make_report
from ..report.data import Per
from .attach import Attachment, attachment_of
from .components import models_beside, unwrap


class Handle:
    """Holds the transformers that one `accelerate` call changed. Also a context manager that removes on exit.

    Must not be used by two threads on the same pipeline (diffusers' schedulers must not either); different
    pipelines in different threads are fine.
    """

    def __init__(self, target: Any, attachments: Iterable[Attachment]) -> None:
        self._target = target
        self.attachments = tuple(attachments)

    @property
    def active(self) -> bool:
        """Whether anything is still accelerated."""
        return any(attachment.active for attachment in self.attachments)

    def report(self, per: Per = "layer", full: bool = False) -> Report:
        """What happened since `accelerate` or `clear`. On CUDA this waits for the device.

        Args:
            per: The rows of the table: "layer", "step" or "branch".
            full: Shows every row, not only the 8 layers with the largest error.

        Returns:
            A report that can be printed, shown in a notebook, and saved.
        """
        hosts = [attachment.host for attachment in self.attachments]
        return make_report(hosts, tuple(self._remarks())).view(per, full)

    def clear(self) -> None:
        """Sets the counters of the report to zero."""
        for attachment in self.attachments:
            attachment.host.clear()

    def reset(self) -> None:
        """Drops what is carried between steps: the next forward pass is step 0 of a new run and starts
        cold."""
        for attachment in self.attachments:
            attachment.forget()

    def remove(self) -> None:
        """Restores every transformer; the report stays readable. Calling it twice is harmless, and Ctrl-C
        waits for its end."""
        with uninterrupted():
            for attachment in self.attachments:
                if attachment.active:
                    attachment.detach()

    def _remarks(self) -> Iterator[str]:
        if not self.active:
            yield "removed: the counters stand as they were"
        for attachment in self.attachments:
            current = unwrap(getattr(self._target, attachment.name, attachment.model))
            if current is not attachment.model:
                yield f"{attachment.name} of the pipeline was replaced and runs dense; accelerate it again"
            elif attachment.active and attachment_of(attachment.model) is not attachment:
                yield f"{attachment.name} was accelerated again by another call"
        for name, model in models_beside(self._target).items():
            if attachment_of(model) is None and self.active:
                yield f"{name} ({type(model).__name__}) runs dense and is not counted: no family knows it"

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        parts = ", ".join(f"{item.name}: {len(item.layers)} layers of {item.family.name}" for item in self.attachments)
        return f"<residua.Handle {'active' if self.active else 'removed'}; {parts}>"

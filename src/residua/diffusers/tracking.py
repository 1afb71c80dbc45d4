"""Where the denoising loop stands: which run, which step, which guidance branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import IntegrationError


class Tracker:
    """Follows one transformer. `advance` is called before each forward pass, `enter` and `leave` by the
    model's `cache_context`. `runs` counts the runs that began."""

    def __init__(self, scheduler: Callable[[], Any], steps: int | None = None) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self.runs = 0
        self._context: tuple[str, dict[str, Any]] | None = None
        self.forget()

    def forget(self) -> None:
        """The next forward pass begins a new run."""
        self.step = -1
        self.branch = ""
        self._calls = 0  # forward passes in this step
        self._schedule: Any = None
        self._timestep: Any = None  # of the previous forward pass, while the scheduler does not tell the step
        self._changes = 0

    def enter(self, name: str, info: dict[str, Any]) -> None:
        self._context = (name, info)

    def leave(self) -> None:
        self._context = None

    def advance(self, timestep: Any) -> None:
        """Places the coming forward pass."""
        schedule = getattr(self._scheduler(), "timesteps", None)
        # set_timesteps makes a new tensor; holding the old one keeps its identity from being reused.
        if self.step < 0 or schedule is not self._schedule:
            self._begin(schedule)
        step = self._locate(timestep)
        if step < self.step:
            self._begin(schedule)
            step = self._locate(timestep)
        self._calls = self._calls + 1 if step == self.step else 0
        self.step = step
        self.branch = self._context[0] if self._context else f"call {self._calls}"

    def _begin(self, schedule: Any) -> None:
        self.forget()
        self._schedule = schedule
        self.runs += 1

    def _locate(self, timestep: Any) -> int:
        info = self._context[1] if self._context else {}
        if info.get("step_index") is not None:
            return int(info["step_index"])
        scheduler = self._scheduler()
        if getattr(scheduler, "step_index", None) is not None:
            # Counted from where the run began: image-to-video may skip the first part of the schedule.
            return int(scheduler.step_index) - self._offset()
        return self._count(timestep)

    def _count(self, timestep: Any) -> int:
        """The step, from how often the timestep changed: for schedulers that do not say it, and before
        their first step. Reads the timestep, which waits for the device once per forward pass."""
        if timestep is None:
            raise IntegrationError(
                "cannot tell the denoising step: the transformer got no timestep and no scheduler is known; "
                "accelerate the pipeline, or pass scheduler="
            )
        now = torch.as_tensor(timestep).detach().clone()
        before, self._timestep = self._timestep, now
        if before is None or (before.shape == now.shape and torch.equal(before, now)):
            return self._changes
        if self._schedule is None and bool(now.max() > before.max()):
            return -1  # noise only falls within a run
        self._changes += 1
        return self._changes

    def _offset(self) -> int:
        return int(getattr(self._scheduler(), "begin_index", None) or 0)

    def total_steps(self) -> int | None:
        """How many steps the run has, or None if nothing says so."""
        info = self._context[1] if self._context else {}
        if info.get("num_inference_steps"):
            return int(info["num_inference_steps"])
        if self._steps is not None:
            return self._steps
        return None if self._schedule is None else max(1, len(self._schedule) - self._offset())

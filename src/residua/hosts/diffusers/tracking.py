"""Tracks the denoising loop: which run, which step, which guidance branch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import IntegrationError
from ..site import Grid, Pass, noise_removed

logger = logging.getLogger("residua.hosts.diffusers")


@dataclass
class Offset:
    """Where in the schedule the run began. Shared by the transformers of a pipeline, because the second one
    of Wan2.2 never sees the beginning."""

    schedule: Any = None  # None: no beginning was seen
    steps: int = 0  # that the run skipped


class Tracker:
    """Tracks one transformer. `advance` is called before each forward pass, `enter` and `leave` by the
    model's `cache_context`. `runs` counts the runs that began."""

    def __init__(self, scheduler: Callable[[], Any], steps: int | None = None, offset: Offset | None = None) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._shared = offset or Offset()
        self.runs = 0
        self._context: tuple[str, dict[str, Any]] | None = None
        self._stands_still = False  # our scheduler, while another one drives the transformer
        self._schedule: Any = None
        self.forget()

    def forget(self) -> None:
        """The next forward pass begins a new run."""
        self._levels: tuple[float, ...] | None = None  # of noise, by the schedule; None: not read yet
        self.step = -1
        self.branch = ""
        self._calls = 0  # forward passes in this step
        self._named: set[str] = set()  # branches that ran in this step
        self._timestep: Any = None  # of the previous forward pass
        self._index: int | None = None  # of the scheduler, at the previous forward pass
        self._changes = 0
        self._counted = False  # whether the last step was found by changes of the timestep

    @property
    def run(self) -> int:
        """The number of the present run, or of the one that the next forward pass begins."""
        return self.runs + (self.step < 0)

    def enter(self, name: str, info: dict[str, Any]) -> None:
        self._context = (name, info)

    def leave(self) -> None:
        self._context = None

    def advance(self, timestep: Any) -> None:
        """Determines step and branch of the coming forward pass."""
        schedule = getattr(self._scheduler(), "timesteps", None)
        # set_timesteps makes a new tensor; holding the old one prevents its id from being reused.
        is_new = schedule is not self._schedule
        if is_new or self.step < 0:
            self._begin(schedule)
            # The same schedule in a new run: a pipeline with another scheduler may share the transformer.
            self._leave_to_timesteps(self._is_used_up() or not (is_new or self._is_due(timestep)))
        step = self._locate(timestep)
        if step < self.step:
            self._begin(schedule)
            step = self._locate(timestep)
        if step != self.step:
            self._calls, self._named = 0, set()
        else:
            self._calls += 1
        self.step = step
        self.branch = self._context[0] if self._context else f"call {self._calls}"
        self._named.add(self.branch)

    def _begin(self, schedule: Any) -> None:
        self.forget()
        self._schedule = schedule
        self.runs += 1

    def _locate(self, timestep: Any) -> int:
        info = self._context[1] if self._context else {}
        if info.get("step_index") is not None:
            return int(info["step_index"])
        index = getattr(self._scheduler(), "step_index", None)
        if index is None or self._stands_still:
            self._counted = True
            return self._count(timestep)
        if index == self._index and self._moved_without(timestep):
            self._leave_to_timesteps(True)
            self.step, self._changes = 0, 0  # everything before was the first step
            self._timestep = torch.as_tensor(self._timestep).detach().clone()
            return self._count(timestep)
        if self._counted:
            # The first index after the run began, so this is at least the second step. Video-to-video may
            # begin in the middle of the schedule.
            steps = int(index) - max(1, self._count(timestep))
            self._shared.schedule, self._shared.steps = self._schedule, steps
            self._counted = False
        self._index, self._timestep = index, timestep
        return max(0, int(index) - self._offset())

    def _moved_without(self, timestep: Any) -> bool:
        """Whether the timestep changed although the scheduler did not. Only checked when a branch comes a
        second time in a step, because it waits for the device."""
        again = self._context[0] in self._named if self._context else self._calls >= 0
        if not again or timestep is None or self._timestep is None:
            return False
        before, now = torch.as_tensor(self._timestep), torch.as_tensor(timestep)
        return before.shape != now.shape or not torch.equal(before, now.to(before.device))

    def _is_used_up(self) -> bool:
        """Whether the scheduler has taken its last step, so that it does not drive this run."""
        index = getattr(self._scheduler(), "step_index", None)
        return index is not None and self._schedule is not None and int(index) >= len(self._schedule)

    def _is_due(self, timestep: Any) -> bool:
        """Whether a timestep is the one that the scheduler is at. Waits for the device."""
        index = getattr(self._scheduler(), "step_index", None)
        if index is None or self._schedule is None or timestep is None:
            return True
        now = torch.as_tensor(timestep)
        return bool((now == torch.as_tensor(self._schedule[int(index)]).to(now)).all())

    def _leave_to_timesteps(self, stands_still: bool) -> None:
        if stands_still and not self._stands_still:
            logger.warning(
                "the scheduler does not move while the transformer runs: steps are counted from the "
                "timesteps. If another scheduler drives it, pass that one as scheduler="
            )
        self._stands_still = stands_still

    def _count(self, timestep: Any) -> int:
        """The step, counted by changes of the timestep: for schedulers without a step index, and before their
        first step. Waits for the device once per forward pass."""
        if timestep is None:
            raise IntegrationError(
                "cannot tell the denoising step: the transformer got no timestep and no scheduler is known; "
                "accelerate the pipeline, or pass scheduler="
            )
        now = torch.as_tensor(timestep).detach().clone()
        before, self._timestep = self._timestep, now
        if before is None or (before.shape == now.shape and torch.equal(before, now)):
            return self._changes
        if _noise_rises(before, now):
            return -1  # within a run the noise only falls
        self._changes += 1
        return self._changes

    def _offset(self) -> int:
        if self._schedule is not None and self._shared.schedule is self._schedule:
            return self._shared.steps
        return int(getattr(self._scheduler(), "begin_index", None) or 0)

    def in_run_of(self, other: Tracker) -> bool:
        """Whether this transformer has run in the present run of another one of its pipeline."""
        return self._schedule is not None and self._schedule is other._schedule

    def place(self, grid: Grid | None = None) -> Pass:
        """Where the present forward pass is."""
        return Pass(max(0, self.step), self.total_steps(), self.branch, self.run, grid, self.removed())

    def total_steps(self) -> int | None:
        """How many steps the run has, or None if nothing says so."""
        info = self._context[1] if self._context else {}
        if info.get("num_inference_steps"):
            return int(info["num_inference_steps"])
        if self._steps is not None:
            return self._steps
        return None if self._schedule is None else max(1, len(self._schedule) - self._offset())

    def removed(self) -> tuple[float, ...]:
        """The noise that every step of the run removes; empty if the scheduler is not that of a flow model,
        or does not drive this run. Waits for the device once in a run."""
        if self._stands_still:
            return ()
        if self._levels is None:
            sigmas = getattr(self._scheduler(), "sigmas", None)
            fits = sigmas is not None and self._schedule is not None and len(sigmas) == len(self._schedule) + 1
            self._levels = tuple(torch.as_tensor(sigmas).tolist()) if fits else ()
        return noise_removed(self._levels)[self._offset() :]


def _noise_rises(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether the noise went up for all frames at once. Diffusion forcing has a level per frame, and those of
    new frames are higher."""
    if not before.numel() or not now.numel():
        return False
    even = bool((before == before.flatten()[0]).all()) and bool((now == now.flatten()[0]).all())
    return even and bool(now.max() > before.max())

"""Runs every rival on every call: error against dense attention, pairs, products, time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....baselines import Outcome, Rival, Task
from ....method.row_error import row_errors
from ....types import Partition, Route, Rows
from ...capture.captures import CapturedCall
from ..common import Watch, watched

WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class Measurement:
    """One rival on one call. Shares are relative to the pairs of dense attention."""

    model: str
    call: str
    method: str
    density: float  # exact pairs
    pairs: int
    parts: dict[str, int]  # the pairs by purpose
    beside: float  # products for prediction and compensation
    charged: float  # what counts against the target: exact pairs, and with all-in the other products
    grouping: float  # products for grouping
    products: dict[str, int]
    mean: float  # relative row error, all rows
    p99: float
    held_out_mean: float  # rows that no method of the study has probed
    held_out_p99: float
    skipped_mass: float | None  # mean over rows; None if the method has no cells of its own
    cpu_seconds: float  # process time of the whole method, grouping included
    seconds: float  # the same as wall-clock time
    backend: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Refusal:
    """A rival that cannot compute a call, and the reason."""

    model: str
    method: str
    reason: str


@dataclass(frozen=True)
class StudySettings:
    density: float = 0.22
    repeats: int = 1
    backend: str = "auto"
    groups: tuple[int, int] | None = None  # query and K/V groups of all methods; None: Residua's defaults


def task_of(captured: CapturedCall, settings: StudySettings) -> Task:
    """The call restricted to its video tokens. Text tokens are left out as rows and as keys: methods treat
    them differently, and only the routing of the rest is compared here."""
    q, k, v = captured.load()
    rows = Rows(captured.text_queries or ()).complement(q.shape[2])
    keys = Rows(captured.text or ()).complement(k.shape[2])
    shares = q.shape[1] // k.shape[1]
    q, k, v = rows.take(q, 2), keys.take(k, 2), keys.take(v, 2)
    k, v = (x.repeat_interleave(shares, dim=1).contiguous() for x in (k, v))
    return Task(
        q.contiguous(), k, v, settings.density, captured.scale, captured.grid, settings.groups, settings.backend
    )


def dense_reference(task: Task) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of every row over all keys, without the whole map in memory."""
    query, kv = (
        Partition.from_labels(torch.zeros(*task.q.shape[:2], n, dtype=torch.long), 1) for n in (task.rows, task.keys)
    )
    return task.attend(Route(query, kv, torch.ones(*task.q.shape[:2], 1, 1, dtype=torch.bool)))


def timed(rival: Rival, task: Task, repeats: int) -> tuple[Outcome, tuple[float, float]]:
    """The outcome, and the median CPU and wall-clock time of some runs, each from scratch. Other work on the
    machine affects CPU time least."""
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = rival.run(task)
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (statistics.median(column) for column in zip(*runs, strict=True))
    return outcome, (cpu, wall)


def measure(
    captured: CapturedCall, rivals: Sequence[Rival], settings: StudySettings
) -> Iterator[Measurement | Refusal]:
    """All rivals on one call, in turn."""
    with torch.no_grad():
        task = task_of(captured, settings)
        dense, lse = dense_reference(task)
        done = []
        for rival in rivals:
            reason = rival.refuses(task)
            if reason:
                yield Refusal(captured.model, rival.name, reason)
            else:
                done.append((rival, *timed(rival, task, settings.repeats)))
        # rows that some method computed exactly are left out for all methods
        probed = [outcome.probe_rows for _, outcome, _ in done if outcome.probe_rows is not None]
        probes = torch.cat(probed, -1) if probed else None
        for rival, outcome, seconds in done:
            yield _measured(captured, rival, task, outcome, seconds, (dense, lse, probes))


def _measured(
    captured: CapturedCall,
    rival: Rival,
    task: Task,
    outcome: Outcome,
    seconds: tuple[float, float],
    truth: tuple[Tensor, Tensor, Tensor | None],
) -> Measurement:
    dense, lse, probes = truth
    mean, p99 = row_errors(outcome.out, dense)
    held_mean, held_p99 = row_errors(outcome.out, dense, probes)
    skipped = None
    if outcome.lse is not None:
        skipped = float((1 - (outcome.lse - lse).exp()).clamp(min=0).mean())
    beside = sum(count for name, count in outcome.products.items() if name != "grouping")
    charged = outcome.executed + (beside if rival.all_in else 0)
    return Measurement(
        model=captured.model,
        call=captured.name,
        method=rival.name,
        density=outcome.executed / task.possible,
        pairs=outcome.executed,
        parts=outcome.pairs,
        beside=beside / task.possible,
        charged=charged / task.possible,
        grouping=outcome.products.get("grouping", 0) / task.possible,
        products=outcome.products,
        mean=mean,
        p99=p99,
        held_out_mean=held_mean,
        held_out_p99=held_p99,
        skipped_mass=skipped,
        cpu_seconds=seconds[0],
        seconds=seconds[1],
        backend=task.backend.name,
    )


def warm_up(captured: CapturedCall, rivals: Sequence[Rival], settings: StudySettings) -> None:
    """Runs everything once on a few tokens, so that no method pays for one-time work of the process."""
    task = task_of(captured, settings)
    few = slice(0, WARM_UP_TOKENS)
    task = replace(task, groups=None, q=task.q[:, :, few], k=task.k[:, :, few], v=task.v[:, :, few], grid=None)
    with torch.no_grad():
        for rival in rivals:
            if not rival.refuses(task):
                rival.run(task)


def measure_all(
    calls: Sequence[CapturedCall], rivals: Sequence[Rival], settings: StudySettings, watch: Watch | None = None
) -> tuple[list[Measurement], list[Refusal]]:
    """Every rival on every call; `watch` is told how many calls are done and which is next."""
    found: list[Measurement] = []
    refused: dict[tuple[str, str], Refusal] = {}
    warm_up(calls[0], rivals, settings)
    for captured in watched(calls, watch):
        for item in measure(captured, rivals, settings):
            if isinstance(item, Refusal):
                refused[item.model, item.method] = item
            else:
                found.append(item)
    return found, list(refused.values())

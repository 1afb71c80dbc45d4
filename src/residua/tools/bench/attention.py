"""One attention call against dense SDPA: interleaved in one process, medians after a warm-up. Raises instead
of reporting times if the outputs are wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...api import attention
from ...config import Config
from ...errors import BackendError, InputError
from ...method.grouping.partition import group_tokens
from ...method.inputs import validate
from ...method.route import route_cells
from ...method.row_error import row_errors
from ...method.stages import SizedCall
from ...ops.backend import Backend, Demand
from ...ops.select import choose_backend
from ...state import State
from ...synthetic import CONCENTRATIONS, VideoLike, grid_for, key_fraction, video_like
from ...types import Call
from ..doctor import cpu
from .check import ROUNDING, kernel_error
from .memory import peak_extra_bytes

FOR_EVER = 10**9  # steps between two clusterings, for calls that are to keep their groups
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Task:
    """What to measure."""

    tokens: int = 16384
    heads: int = 2
    head_dim: int = 128
    density: float = 0.22
    dtype: str = "fp32"
    concentration: str = "medium"
    backend: str = "auto"
    repeats: int = 5
    reconstruction: str = "anchored"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype={self.dtype!r}: wanted one of {', '.join(DTYPES)}")
        if self.concentration not in CONCENTRATIONS:
            raise InputError(f"concentration={self.concentration!r}: wanted one of {', '.join(CONCENTRATIONS)}")
        for name in ("tokens", "heads", "head_dim", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: wanted at least 1")

    def call(self) -> tuple[Tensor, Tensor, Tensor]:
        grid = grid_for(self.tokens)
        recipe = VideoLike(grid, self.heads, self.head_dim, CONCENTRATIONS[self.concentration])
        return video_like(recipe, DTYPES[self.dtype])

    @property
    def key_fraction(self) -> float:
        """Share of the keys that hold 95 % of the attention mass, mean over heads."""
        q, k, _ = self.call()
        return float(key_fraction(q, k).mean())


@dataclass(frozen=True)
class Measurement:
    """Times in milliseconds, medians over the repeats."""

    task: Task
    dense_ms: float
    call_ms: float  # warm-started, tokens keep the groups of the step before
    regroup_ms: float  # warm-started, tokens are clustered again: one call in `regroup_every`
    cold_ms: float
    stages_ms: dict[str, float]
    kernel_ms: float  # the sparse attention stage alone
    kernel_density: float  # what it evaluates: routed pairs and summary keys
    density: float
    cost: float  # density plus all other work
    mean_error: float  # of the output against dense attention, relative, per row
    p99_error: float
    estimated_error: float | None
    peak_extra_bytes: int | None
    tensor_bytes: int  # of q, k, v and the output
    backend: str
    threads: int
    cpu: str

    @property
    def limit(self) -> float:
        """The speed-up of a method that computes only its pairs, as fast per pair as dense attention."""
        return 1 / self.task.density

    @property
    def speedup(self) -> float:
        return self.dense_ms / self.call_ms

    @property
    def run_speedup(self) -> float:
        """The speed-up over a long run, in which some calls cluster their tokens again."""
        every = Config().regroup_every
        return self.dense_ms / (((every - 1) * self.call_ms + self.regroup_ms) / every)

    @property
    def kernel_over_limit(self) -> float:
        return self.kernel_ms / (self.kernel_density * self.dense_ms)

    @property
    def overhead(self) -> float:
        """Share of the warm call that is not the kernel."""
        return 1 - self.kernel_ms / self.call_ms

    @property
    def memory_ratio(self) -> float | None:
        """Extra peak memory in units of q + k + v + output."""
        return None if self.peak_extra_bytes is None else self.peak_extra_bytes / self.tensor_bytes

    def to_dict(self) -> dict[str, Any]:
        names = ("limit", "speedup", "run_speedup", "kernel_over_limit", "overhead", "memory_ratio")
        derived = {name: getattr(self, name) for name in names}
        return {**asdict(self), **derived, "residua": __version__, "torch": torch.__version__}


def measure(task: Task, progress: Callable[[str], None] = lambda _: None) -> Measurement:
    """Measures one task; raises BackendError instead of reporting times of a wrong result."""
    config = Config(density=task.density, backend=task.backend, reconstruction=task.reconstruction)
    q, k, v = task.call()
    state = State()
    progress("check")
    backend = _checked_backend(validate(q, k, v), config)
    progress("cold")
    cold = _seconds(lambda: attention(q, k, v, config, state))
    memory = peak_extra_bytes(lambda: attention(q, k, v, config, state))
    dense, warm, regrouped, stages = [], [], [], []
    kept, again = replace(config, regroup_every=FOR_EVER), replace(config, regroup_every=1)
    clustering = State()  # remembers no groups, only where they lay
    for own, remembered in ((kept, state), (again, clustering)):
        attention(q, k, v, own, remembered)
    for _ in range(task.repeats):
        progress("dense")
        dense.append(_seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)))
        progress("sparse")
        regrouped.append(_seconds(lambda: attention(q, k, v, again, clustering)))
        warm.append(_seconds(lambda: attention(q, k, v, kept, state)))
        _, receipt = attention(q, k, v, kept, state, return_receipt=True, time_stages=True)
        assert receipt.timings is not None
        stages.append(receipt.timings.seconds)
    out, receipt = attention(q, k, v, config, state, return_receipt=True)
    mean, p99 = row_errors(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    if not mean < 1.0:
        raise BackendError(f"the output is off by {mean:.3g} of its size on average; nothing is reported")
    per_stage = {name: 1e3 * statistics.median(s[name] for s in stages) for name in stages[0]}
    return Measurement(
        task=task,
        dense_ms=1e3 * statistics.median(dense),
        call_ms=1e3 * statistics.median(warm),
        regroup_ms=1e3 * statistics.median(regrouped),
        cold_ms=1e3 * cold,
        stages_ms=per_stage,
        kernel_ms=per_stage["attention"],
        kernel_density=receipt.costs["routed"] + receipt.costs.get("summary", 0.0),
        density=receipt.density,
        cost=receipt.cost,
        mean_error=mean,
        p99_error=p99,
        estimated_error=receipt.error,
        peak_extra_bytes=memory,
        tensor_bytes=sum(x.numel() * x.element_size() for x in (q, k, v, out)),
        backend=backend.name,
        threads=torch.get_num_threads(),
        cpu=cpu()["model"],
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _checked_backend(call: Call, config: Config) -> Backend:
    """The backend, after its kernel agreed with fp64 on this call's route."""
    backend = choose_backend(config.backend, Demand.of(call))
    with torch.no_grad():
        sized = SizedCall.of(call, config, backend)
        grouping = group_tokens(sized)
        route = route_cells(call, grouping, config.density, sized.sizes.probes, config.score, backend)
        out, _ = backend.attend(call.q, call.k, call.v, route, call.scale)
    error = kernel_error(call, route, out)
    allowed = ROUNDING[call.q.dtype]
    if not error <= allowed:
        raise BackendError(f"backend {backend.name}: rows differ from fp64 by {error:.3g}, more than {allowed:g}")
    return backend

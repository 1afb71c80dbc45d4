"""One attention call against dense SDPA: interleaved in one process, medians after a warm-up. Raises instead
of reporting times if the outputs are wrong."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...api import attention
from ...config import Config
from ...errors import BackendError
from ...method.grouping.partition import group_tokens
from ...method.inputs import validate
from ...method.route import route_cells
from ...method.stages import SizedCall
from ...ops.backend import Backend, Demand
from ...ops.select import choose_backend
from ...state import State
from ...types import Call
from ..doctor import cpu
from ..metrics.row_error import row_errors
from ..synthetic import key_fraction, video_like
from .case import DTYPES, BenchCase, median_stages_ms, milliseconds
from .check import ROUNDING, kernel_error
from .memory import peak_extra_bytes

FOR_EVER = 10**9  # steps between two clusterings, for calls that are to keep their groups
CPU = torch.device("cpu")


@dataclass(frozen=True)
class CallCase(BenchCase):
    """What to measure on the CPU."""

    backend: str = "auto"
    reconstruction: str = "anchored"

    def call(self) -> tuple[Tensor, Tensor, Tensor]:
        return video_like(self.recipe, DTYPES[self.dtype])

    @property
    def key_fraction(self) -> float:
        """Share of the keys that hold 95 % of the attention mass, mean over heads."""
        q, k, _ = self.call()
        return float(key_fraction(q, k).mean())


@dataclass(frozen=True)
class CallTimes:
    """Times in milliseconds, medians over the repeats."""

    task: CallCase
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


def measure(task: CallCase, progress: Callable[[str], None] = lambda _: None) -> CallTimes:
    """Measures one task; raises BackendError instead of reporting times of a wrong result."""
    config = Config(density=task.density, backend=task.backend, reconstruction=task.reconstruction)
    q, k, v = task.call()
    state = State()
    progress("check")
    backend = _checked_backend(validate(q, k, v), config)
    progress("cold")
    cold = milliseconds(lambda: attention(q, k, v, config, state), 1, CPU)
    memory = peak_extra_bytes(lambda: attention(q, k, v, config, state))
    dense, warm, regrouped, receipts = [], [], [], []
    kept, again = replace(config, regroup_every=FOR_EVER), replace(config, regroup_every=1)
    clustering = State()  # remembers no groups, only where they lay
    for own, remembered in ((kept, state), (again, clustering)):
        attention(q, k, v, own, remembered)
    for _ in range(task.repeats):
        progress("dense")
        dense.append(milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), 1, CPU))
        progress("sparse")
        regrouped.append(milliseconds(lambda: attention(q, k, v, again, clustering), 1, CPU))
        warm.append(milliseconds(lambda: attention(q, k, v, kept, state), 1, CPU))
        receipts.append(attention(q, k, v, kept, state, return_receipt=True, time_stages=True)[1])
    out, receipt = attention(q, k, v, config, state, return_receipt=True)
    mean, p99 = row_errors(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    if not mean < 1.0:
        raise BackendError(f"the output is off by {mean:.3g} of its size on average; nothing is reported")
    per_stage = median_stages_ms(receipts)
    return CallTimes(
        task=task,
        dense_ms=statistics.median(dense),
        call_ms=statistics.median(warm),
        regroup_ms=statistics.median(regrouped),
        cold_ms=cold,
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


def _checked_backend(call: Call, config: Config) -> Backend:
    """The backend, after its kernel agreed with fp64 on this call's route."""
    backend = choose_backend(config.backend, Demand.of(call))
    with torch.no_grad():
        sized = SizedCall.of(call, config, backend)
        route = route_cells(sized.grouped(group_tokens(sized))).route
        out, _ = backend.attend(call.q, call.k, call.v, route, call.scale)
    error = kernel_error(call, route, out)
    allowed = ROUNDING[call.q.dtype]
    if not error <= allowed:
        raise BackendError(f"backend {backend.name}: rows differ from fp64 by {error:.3g}, more than {allowed:g}")
    return backend

"""`residua bench gpu`: measurements that a user with a GPU runs once and sends back.

We have no GPU, so none of this was measured by us. A backend is checked first; times of a wrong result are
never reported.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from ...method.stages import Routing, SizedCall
from ...method.summary.expansion import assign_slots, expand
from ...ops.backend import Backend, Demand
from ...ops.gpu_cache import remember
from ...ops.select import backends
from ...state import State
from ...types import Call, Route, SummaryKeys
from ..doctor import installed
from ..metrics.row_error import row_errors
from ..reports.table import Table
from .case import BenchCase, median_stages_ms, milliseconds
from .check import ROUNDING, kernel_error
from .dense import dense_kernels

MAX_CALL_ERROR = 0.5  # mean error of a call that no head can have unless something is broken
Progress = Callable[[str], None]


@dataclass(frozen=True)
class GpuCase(BenchCase):
    """What to measure on a GPU; the defaults are a call of HunyuanVideo at 720p."""

    tokens: int = 75600
    heads: int = 24
    dtype: str = "bf16"
    repeats: int = 10


def require_gpu() -> torch.device:
    """The GPU to measure, or an error that says what is missing."""
    if not torch.cuda.is_available():
        raise BackendError(
            f"torch {torch.__version__} sees no CUDA device, and `residua bench gpu` measures nothing else; "
            "run it on a machine with an NVIDIA GPU, or measure the CPU with `residua bench attention`"
        )
    return torch.device("cuda", torch.cuda.current_device())


def measure(task: GpuCase, device: torch.device, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Everything about one task on one device, as plain values for JSON."""
    progress("making a call")
    call = validate(*task.tensors(device))
    dense_ms: dict[str, Any] = {}
    dense = None
    for name, kernel in dense_kernels(call.q, call.k, call.v, call.scale).items():
        progress(f"dense: {name}")
        dense_ms[name], out = _try_dense(kernel, task.repeats, device)
        dense = out if dense is None else dense
    if dense is None:
        raise BackendError(f"no dense kernel took the call, so there is nothing to compare with: {dense_ms}")
    found = {}
    for name, backend in backends().items():
        reasons = backend.reasons(Demand.of(call))
        if reasons or name == "reference":
            found[name] = {"reasons": reasons or ["what the others are measured by, too slow itself"]}
        else:
            progress(f"backend: {name}")
            found[name] = measure_backend(task, call, backend, dense, progress)
    if device.type == "cuda":  # `auto` uses what was measured here
        timed = {name: row["call_ms"] for name, row in found.items() if "call_ms" in row}
        remember(device, order=sorted(timed, key=lambda name: timed[name]))
    facts = environment(device)
    return {"task": asdict(task), "environment": facts, "dense_ms": dense_ms, "backends": found}


def _try_dense(kernel: Callable[[], Tensor] | str, repeats: int, device: torch.device) -> tuple[Any, Any]:
    if isinstance(kernel, str):
        return kernel, None
    try:
        return milliseconds(kernel, repeats, device), kernel()
    except RuntimeError as error:  # SDPA's way to say that a kernel does not take the call
        return f"refused: {str(error).splitlines()[0]}", None


def measure_backend(task: GpuCase, call: Call, backend: Backend, dense: Tensor, progress: Progress) -> dict[str, Any]:
    """Checks a backend's kernel, then times its primitives and whole calls."""
    config = Config(density=task.density, backend=backend.name)
    device = call.q.device
    with torch.no_grad():
        works, route, summary = primitives(call, config, backend)
        out, _ = backend.attend(call.q, call.k, call.v, route, call.scale, summary)
        without, _ = backend.attend(call.q, call.k, call.v, route, call.scale)
        # checked as timed: the kernel without a summary, and with one that has a drift
        errors = kernel_error(call, route, without), kernel_error(call, route, out, summary)
        error = float(torch.tensor(errors, dtype=torch.float64).max())  # NaN if one is NaN, which `max` might drop
        if not error <= ROUNDING[call.q.dtype]:
            limit = ROUNDING[call.q.dtype]
            return {"wrong": f"rows differ from fp64 by {error:.3g}, more than {limit:g}: no times are reported"}
        again, _ = backend.attend(call.q, call.k, call.v, route, call.scale, summary)
        del without
        times = {}
        for name, work in works.items():
            progress(f"{backend.name}: {name}")
            times[name] = milliseconds(work, task.repeats, device)
    progress(f"{backend.name}: calls")
    report = {"kernel_error": error, "bit_identical": torch.equal(out, again), "primitives_ms": times}
    del out, again
    calls = _measure_calls(task, call, config, dense)
    return calls if "wrong" in calls else {**report, **calls}


def _measure_calls(task: GpuCase, call: Call, config: Config, dense: Tensor) -> dict[str, Any]:
    device, state = call.q.device, State()

    def run(**options: Any) -> Any:
        return attention(call.q, call.k, call.v, config, state, **options)

    run()  # compiles kernels that are not compiled yet
    state.reset()
    cold = milliseconds(run, 1, device)
    warm = milliseconds(run, task.repeats, device)
    receipts = [run(return_receipt=True, time_stages=True)[1] for _ in range(task.repeats)]
    peak = peak_bytes(run, device)
    out, receipt = run(return_receipt=True)
    mean, p99 = row_errors(out, dense)
    if not mean <= MAX_CALL_ERROR:
        return {"wrong": f"the whole call differs from dense attention by {mean:.3g}: no times are reported"}
    return {
        "cold_ms": cold,
        "call_ms": warm,
        "stages_ms": median_stages_ms(receipts),
        "density": receipt.density,
        "routed_density": float(receipt.pairs.density("routed")),
        "mean_error": mean,
        "p99_error": p99,
        "estimated_error": receipt.error,
        "peak_extra_bytes": peak,
    }


def primitives(
    call: Call, config: Config, backend: Backend
) -> tuple[dict[str, Callable[[], object]], Route, SummaryKeys]:
    """Each primitive as it is used inside a call, ready to be timed, and the resulting route and summary."""
    sized = SizedCall.of(call, config, backend)
    sizes, grouping = sized.sizes, group_tokens(sized)
    grouped = sized.grouped(grouping)
    route = route_cells(grouped).route
    batch, heads, _, dim = call.q.shape
    rank = sizes.query_rank
    factor = torch.eye(dim, rank, device=call.q.device).expand(batch, heads, dim, rank)
    x = backend.project(call.q, factor, True).flatten(0, 1)  # [B * H, N, R]
    centres = x[:, : sizes.query_groups].contiguous()
    anchors = grouping.anchors
    mass = backend.cell_mass(anchors, call.k, grouping.kv, call.scale)
    nobody = torch.zeros(batch, heads, dtype=torch.bool, device=call.q.device)
    routing = Routing(route, mass, without_summary=nobody)
    slots = assign_slots(grouped, routing)
    summary = expand(grouped, routing, slots)
    share = slots.share.unflatten(1, (call.k.shape[1], call.heads_per_kv)).flatten(2, 3)
    to_key = factor[:, : call.k.shape[1], :, : sizes.drift_rank]
    rows = call.q[:, :, : max(1, sizes.probes)]
    out = torch.zeros(*call.q.shape[:3], call.v.shape[-1], device=call.q.device)
    left, right, bias = out[:, :, :1, :].mT, out[:, :, :1], out[:, :, 0]
    return (
        {
            "project": lambda: backend.project(call.q, factor, True),
            "lloyd": lambda: backend.lloyd(x, centres, 1, None),
            "group_means": lambda: backend.group_means(call.k, grouping.kv),
            "gather_rows": lambda: backend.gather_rows(call.k, grouping.kv.order),
            "cell_mass": lambda: backend.cell_mass(anchors, call.k, grouping.kv, call.scale),
            "slot_summary": lambda: backend.slot_summary(
                anchors, call.k, call.v, grouping.kv, slots.index, slots.log_mass, call.scale, slots.near, slots.single
            ),
            "skipped_covariance": lambda: backend.skipped_covariance(
                share, call.k, to_key, call.v, grouping.kv, grouping.kv_centroids
            ),
            "attend": lambda: backend.attend(call.q, call.k, call.v, route, call.scale),
            "attend, with a summary": lambda: backend.attend(call.q, call.k, call.v, route, call.scale, summary),
            "attend_rows": lambda: backend.attend_rows(rows, call.k, call.v, None, call.scale),
            "add_affine": lambda: backend.add_affine(out, left, right, bias, call.q.dtype),
        },
        route,
        summary,
    )


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Device memory that `work` needs beyond what is held already."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return int(torch.cuda.max_memory_allocated(device) - before)


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on; nothing that identifies the user or the machine."""
    found: dict[str, Any] = {"residua": __version__, "torch": torch.__version__, "device": device.type}
    found |= {package: installed(package) for package in ("triton", "flashinfer-python", "flash-attn")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["capability"] = f"sm_{properties.major}{properties.minor}"
        found["processors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    return found


def tables(report: dict[str, Any]) -> list[Table]:
    """The report for a terminal: dense kernels, then backends."""
    times = report["dense_ms"]
    dense = tuple((name, f"{value:.2f}" if isinstance(value, float) else value) for name, value in times.items())
    best = min((value for value in times.values() if isinstance(value, float)), default=float("nan"))
    columns = ("backend", "call ms", "speed-up", "kernel ms", "cold ms", "density", "mean error", "p99 error")
    rows, reasons = [], []
    for name, found in report["backends"].items():
        if "call_ms" not in found:
            rows.append((name, *["-"] * (len(columns) - 1)))
            reasons.append(f"{name}: {found.get('wrong') or '; '.join(found['reasons'])}")
            continue
        took = (found["call_ms"], best / found["call_ms"], found["primitives_ms"]["attend"], found["cold_ms"])
        shares = (found["density"], found["mean_error"], found["p99_error"])
        rows.append((name, *(f"{t:.2f}" for t in took), *(f"{s:.4f}" for s in shares)))
    title = "Sparse attention, against the fastest dense kernel"
    return [
        Table("Dense attention", ("dense kernel", "ms"), dense),
        Table(title, columns, tuple(rows), "\n".join(reasons)),
    ]

"""From counts to milliseconds: the static cost model of one warm call.

A Triton kernel takes as long as the slowest of: its matrix instructions, its instruction slots, the chain of
both in one block (shared by as many blocks as a processor holds), device memory, the second-level cache, and
the launch. An operation of torch takes as long as its bytes or its FLOPs. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dev.gpu_model.route import RouteTiles, count_tiles, real_route
from dev.gpu_model.sass import Code, read_code
from dev.gpu_model.trace import Launch, Operation, Shape, Trace, trace_call
from dev.gpu_model.work import Work, work_of
from dev.processes import in_processes
from residua.config import Config
from residua.errors import BackendError
from residua.tools.plan.speeds import Gpu
from residua.util.interrupts import uninterrupted

STALL = 1.2  # what barriers and uneven warps add to the ideal time of a kernel that multiplies
LAUNCH_US = 2.5  # between the ends of two kernels that do next to nothing
HOST_US = 4.5  # that Python and torch need per kernel of torch; they run ahead of the GPU
TRITON_HOST_US = 15.0  # and per launch of a Triton kernel, whose arguments are looked at in Python
SCHEDULERS = 4  # warps that a processor can issue from in one clock
SPECIAL = 16  # exponentials per clock of a processor
WARP_MMA = 0.62  # share of sm_90's matrix rate that instructions of single warps reach
WARP_KERNELS = ("slots", "covariance", "key_covariance")  # too few rows for the others
LIBRARY_MMA = 0.5  # share of the matrix rate that a product of torch in 16 bits reaches
REGISTERS = 65536

Codes = dict[tuple[Any, ...], Code]  # by signature

ASSUMPTIONS = (
    "nothing was run on a GPU: launches, bytes, memory and instructions are counted, times are computed",
    f"kernels that multiply take {STALL} x the ideal time; softmax arithmetic waits for the matrix "
    "instructions of its own block, and overlaps with those of other blocks on the processor",
    f"{LAUNCH_US} us per kernel on the GPU; on the host, which runs ahead, {HOST_US} us per kernel of torch "
    f"and {TRITON_HOST_US:g} us per Triton launch",
    "device memory is moved once per kernel and tensor",
    "the route is that of one head of a synthetic call of medium concentration",
    "the figures are those of a warm call that clusters its tokens; most calls keep the groups of the one "
    "before, which is cheaper",
)


@dataclass(frozen=True)
class Task:
    """The call that is estimated."""

    tokens: int = 75600
    heads: int = 40
    head_dim: int = 128
    density: float = 0.22
    kv_heads: int | None = None
    label: str = "wan2.2"


@dataclass(frozen=True)
class StageCost:
    """One stage of the call."""

    stage: str
    launches: int
    gigabytes: float
    issued_tflop: float
    useful_tflop: float
    ms: float
    bound: str  # what most of its time goes to


@dataclass(frozen=True)
class KernelCost(StageCost):
    """All launches of one kernel variant in one stage."""

    kernel: str
    registers: int
    occupancy: int  # blocks per processor
    instructions: tuple[int, ...]  # of the loops that multiply, per trip and warp


@dataclass(frozen=True)
class Estimate:
    """What a warm call would cost."""

    gpu: Gpu
    task: Task
    estimated_ms: float
    launches: int
    gigabytes: float
    peak_gib: float  # above q, k and v
    tiles: RouteTiles
    stages: tuple[StageCost, ...]
    kernels: tuple[KernelCost, ...]
    host_ms: float
    kept: Estimate | None = None  # the same call where its tokens stay in the groups of the call before
    regroup_every: int = 1  # so many calls share their groups

    @property
    def mean_ms(self) -> float:
        """Over the calls that share their groups: one clusters, the others do not."""
        if self.kept is None:
            return self.estimated_ms
        others = self.regroup_every - 1
        return (self.estimated_ms + others * self.kept.estimated_ms) / self.regroup_every

    @property
    def attend_instructions(self) -> int:
        """Per 64 keys and warp, of the attention kernel."""
        return next(k for k in self.kernels if k.kernel == "attend" and k.stage == "attention").instructions[0]

    @property
    def dense_tflop(self) -> float:
        return 4 * self.task.tokens**2 * self.task.head_dim * self.task.heads / 1e12

    def figures(self) -> dict[str, float]:
        """What everything else explains."""
        return {
            "estimated_ms": self.estimated_ms,
            "launches": self.launches,
            "gigabytes": self.gigabytes,
            "peak_gib": self.peak_gib,
            "mma_utilisation": self.tiles.utilisation,
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the figures first, then what they are made of."""
        fa2, fa3 = self.dense_tflop / self.gpu.dense * 1e3, self.dense_tflop / self.gpu.fast_dense * 1e3
        return {
            **self.figures(),
            "stages": [asdict(stage) for stage in self.stages],
            "mean_ms": self.mean_ms,
            "regroup_every": self.regroup_every,
            "kept_groups": None if self.kept is None else self.kept.figures(),
            "dense_ms": {"flash-attention-2": fa2, "best published": fa3},
            "speedup": {"flash-attention-2": fa2 / self.estimated_ms, "best published": fa3 / self.estimated_ms},
            "host_ms": self.host_ms,
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "gpu": asdict(self.gpu),
            "task": asdict(self.task),
            "assumptions": list(ASSUMPTIONS),
        }


def estimate(task: Task, gpu: Gpu, workers: int | None = None, codes: Codes | None = None) -> Estimate:
    """Traces the call, compiles what it launches, counts, and adds up.

    Args:
        task: the call.
        gpu: the GPU.
        workers: processes that compile; None: one per core, two at most.
        codes: what was compiled before for this architecture; what is compiled now is put into it.
    """
    config, codes = Config(density=task.density), {} if codes is None else codes
    traces = trace_both(config, task, gpu)
    new = {signature(x): x for trace in traces for x in trace.launches if signature(x) not in codes}
    codes.update(zip(new, compile_launches(list(new.values()), gpu.arch, workers), strict=True))
    tiles = tiles_of(traces[0], task)
    found, *kept = (add_up(task, gpu, trace, tiles, codes) for trace in traces)
    return replace(found, kept=kept[0] if kept else None, regroup_every=config.regroup_every)


def trace_both(config: Config, task: Task, gpu: Gpu) -> list[Trace]:
    """A warm call that clusters its tokens, and one that keeps the groups of the call before."""
    shape = {"tokens": task.tokens, "heads": task.heads, "head_dim": task.head_dim, "kv_heads": task.kv_heads}
    device = {"processors": gpu.processors, "arch": gpu.arch}
    both = dict.fromkeys((replace(config, regroup_every=1), config))
    # An interrupt in a tensor without memory would pass through C++ that lets no exception out, and abort.
    with uninterrupted():
        return [trace_call(one, **shape, **device) for one in both]  # type: ignore[arg-type]


def tiles_of(trace: Trace, task: Task) -> RouteTiles:
    """The tiles that the call's attention kernel cuts a real route into."""
    sizes = [x.arguments for x in trace.launches if x.name == "attend"]
    tall = next(a for a in sizes if not a["LOW"])
    route = real_route(task.tokens, task.head_dim, task.density)
    return count_tiles(route, tall["ROWS"], tall["BN"], any(a["LOW"] for a in sizes))


def signature(launch: Launch) -> tuple[Any, ...]:
    """What makes the compiler produce another kernel."""
    a = launch.arguments
    shapes = tuple((n, x.dtype, x.strides[-1:] == (1,)) for n, x in a.items() if isinstance(x, Shape))
    fixed = tuple((n, x) for n, x in a.items() if n.isupper() and not isinstance(x, Shape) and len(n) > 1)
    return (launch.kernel.fn.__name__, shapes, fixed, tuple(sorted(launch.options.items())))


def compile_launches(launches: Sequence[Launch], arch: int, workers: int | None = None) -> list[Code]:
    """The machine code of every launch."""
    jobs = [(x.kernel.fn.__module__, x.kernel.fn.__name__, x.arguments, x.options, arch) for x in launches]
    workers = workers or min(2, os.cpu_count() or 1)
    return list(map(_compile, jobs) if workers == 1 or not jobs else in_processes(_compile, jobs, workers))


def _compile(job: tuple[str, str, dict[str, Any], dict[str, Any], int]) -> Code:
    from dev.gate.compile import compile_only

    module, name, arguments, options, arch = job
    kernel = getattr(importlib.import_module(module), name)
    given = {n: x.meta() if isinstance(x, Shape) else x for n, x in arguments.items()}
    with compile_only(arch) as seen:
        kernel[(1,)](**given, **options)
    return read_code(seen[0])


def occupancy(code: Code, gpu: Gpu) -> int:
    """Blocks that a processor holds at the same time."""
    per_warp = 32 * max(8, math.ceil(code.registers / 8) * 8)
    by_registers = REGISTERS // (per_warp * code.warps)
    by_shared = gpu.shared * 1024 // (code.shared + 1024)
    return max(1, min(by_registers, by_shared, gpu.warps // code.warps, 32))


def kernel_ms(work: Work, code: Code, programs: int, gpu: Gpu) -> tuple[float, str]:
    """Milliseconds of one launch, and what bounds it."""
    blocks = occupancy(code, gpu)
    turns = code.warps / SCHEDULERS  # instructions that a scheduler issues for one of every warp
    loops = code.products
    if work.trips and loops and len(loops) != len(work.trips):
        if len(loops) < len(work.trips):
            raise BackendError(f"{code.name}: {len(loops)} loops multiply, the cost model counts {work.trips}")
        loops = loops[-len(work.trips) :]
    trips = work.trips if loops else ()
    issue = turns * sum(n * loop.instructions for n, loop in zip(trips, loops, strict=False))
    issue += turns * code.straight * programs
    waits = turns * sum(n * loop.dependent for n, loop in zip(trips, loops, strict=False))
    special = 32 * code.warps / SPECIAL * sum(n * x.special for n, x in zip(trips, loops, strict=False))
    rate = gpu.mma * (WARP_MMA if gpu.arch == 90 and code.name in WARP_KERNELS else 1.0)
    matrix = work.flops / rate
    seconds = {"matrix": matrix, "issue": max(issue, special), "chain": (matrix + waits) / blocks}
    full = programs / (gpu.processors * blocks)
    waste = math.ceil(full) / full if 0 < full < 8 else 1.0  # the last wave of blocks is not full
    times = {name: STALL * waste * x / gpu.processors / gpu.clock for name, x in seconds.items()}
    if work.serial_cycles:
        times["latency"] = work.serial_cycles * max(1, math.ceil(full)) / gpu.clock
    times["memory"] = work.bytes / (gpu.bandwidth * 1e12)
    times["cache"] = max(work.cache_bytes, work.bytes) / (gpu.cache_bandwidth * 1e12)
    times["launch"] = LAUNCH_US * 1e-6
    bound = max(times, key=lambda name: times[name])
    return 1e3 * times[bound], bound


def operation_ms(op: Operation, gpu: Gpu) -> tuple[float, str]:
    """Milliseconds of one operation of torch."""
    rate = gpu.fp64 if op.dtype == "float64" else gpu.fp32
    if op.dtype in ("bfloat16", "float16"):
        rate = LIBRARY_MMA * gpu.mma * gpu.processors * gpu.clock / 1e12
    times = {
        "launch": op.kernels * LAUNCH_US * 1e-3,
        "memory": op.bytes / (gpu.bandwidth * 1e9),
        "arithmetic": op.flops / (rate * 1e9),
    }
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def add_up(task: Task, gpu: Gpu, trace: Trace, tiles: RouteTiles, codes: Codes) -> Estimate:
    """Every operation and launch in its stage, then the stages."""
    launches: dict[tuple[Any, ...], list[tuple[Launch, Work, float, str]]] = {}
    spent: dict[str, dict[str, float]] = {stage: {} for stage in trace.stages}
    for launch in trace.launches:
        key, work = signature(launch), work_of(launch, tiles)
        ms, bound = kernel_ms(work, codes[key], launch.grid, gpu)
        launches.setdefault((launch.stage, key), []).append((launch, work, ms, bound))
        spent[launch.stage][bound] = spent[launch.stage].get(bound, 0.0) + ms
    for op in trace.operations:
        ms, bound = operation_ms(op, gpu)
        spent[op.stage][bound] = spent[op.stage].get(bound, 0.0) + ms
    kernels = [_kernel_cost(stage, codes[key], gpu, same) for (stage, key), same in launches.items()]
    stages = []
    for stage, times in spent.items():
        operations = [op for op in trace.operations if op.stage == stage]
        own = [kernel for kernel in kernels if kernel.stage == stage]
        flops = sum(op.flops for op in operations) / 1e12
        launched = sum(op.kernels for op in operations) + sum(kernel.launches for kernel in own)
        moved = sum(op.bytes for op in operations) / 1e9 + sum(kernel.gigabytes for kernel in own)
        issued = flops + sum(kernel.issued_tflop for kernel in own)
        useful = flops + sum(kernel.useful_tflop for kernel in own)
        bound = max(times, key=times.__getitem__)
        stages.append(StageCost(stage, launched, moved, issued, useful, sum(times.values()), bound))
    host = sum(op.kernels for op in trace.operations) * HOST_US * 1e-3
    host += len(trace.launches) * TRITON_HOST_US * 1e-3
    return Estimate(
        gpu,
        task,
        max(host, sum(stage.ms for stage in stages)),
        trace.kernels,
        sum(stage.gigabytes for stage in stages),
        trace.peak_bytes / 2**30,
        tiles,
        tuple(stages),
        tuple(sorted(kernels, key=lambda kernel: -kernel.ms)),
        host,
    )


def _kernel_cost(stage: str, code: Code, gpu: Gpu, same: list[tuple[Launch, Work, float, str]]) -> KernelCost:
    """All launches of one compiled kernel in one stage."""
    return KernelCost(
        stage=stage,
        kernel=same[0][0].name,
        launches=len(same),
        registers=code.registers,
        occupancy=occupancy(code, gpu),
        instructions=tuple(loop.instructions for loop in code.products),
        gigabytes=sum(work.bytes / 1e9 for _, work, _, _ in same),
        issued_tflop=sum(work.flops / 1e12 for _, work, _, _ in same),
        useful_tflop=sum(work.useful / 1e12 for _, work, _, _ in same),
        ms=sum(ms for _, _, ms, _ in same),
        bound=same[-1][3],
    )

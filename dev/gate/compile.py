"""The compile gate: every kernel through Triton's compiler for every supported GPU, on a machine without one.

The real launchers run, with Triton's driver replaced by one that names a target and never launches. What is
compiled is what a user's GPU gets. A kernel fails that spills registers, needs more shared memory than a
block may have, or was emptied by the compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dev.gate.cases import Case, cases
from dev.gate.cubin import disassemble, spilled, usage
from dev.processes import in_processes
from residua.errors import BackendError
from residua.ops.triton.backend import TritonBackend
from residua.ops.triton.entry import interpreting

# shared memory that one block may use, in bytes (CUDA programming guide, compute capabilities)
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
MATRIX_INSTRUCTIONS = ("tcgen05.mma", "wgmma", "mma.sync", "fma.rn.f32")
_MEASURED: dict[str, Compiled] = {}  # of this process, by the hash of the compiled kernel


@dataclass(frozen=True)
class Compiled:
    """One kernel, one variant, one GPU."""

    kernel: str
    variant: str
    arch: int
    registers: int
    spills: int  # bytes stored and loaded
    shared: int  # bytes
    warps: int
    instruction: str  # the matrix instruction that does the work, if any
    error: str = ""

    @property
    def problems(self) -> list[str]:
        if self.error:
            return [self.error]
        found = []
        if self.spills:
            found.append(f"spills {self.spills} bytes")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, the limit is {SHARED_LIMIT[self.arch]}")
        if self.instruction == "none":
            found.append("the compiler dropped its products")
        return found


def missing() -> str | None:
    """Why the gate cannot run here, or None."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'residua[gpu]'"
    if interpreting():
        return "TRITON_INTERPRET=1 replaces the compiler: unset it"
    return None


class _Target:
    """Stands for Triton's driver: names a GPU, owns none."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps its compiled kernels per device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def compile_only(arch: int) -> Iterator[list[Any]]:
    """Inside, a Triton launch compiles for sm_`arch` and runs nothing; yields what was compiled."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run, seen = JITFunction.run, []

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        seen.append(run(self, *args, grid=grid, warmup=True, **options))
        return seen[-1]

    with mock.patch.object(JITFunction, "run", compile_instead), mock.patch.object(driver, "_active", _Target(arch)):
        yield seen


def compile_case(case: Case, arch: int) -> dict[str, Compiled]:
    """Compiles what one case launches -> by the hash of the compiled kernel."""
    with compile_only(arch) as seen:
        try:
            case.launch(TritonBackend())
        except RuntimeError as error:  # Triton's compiler reports its own failures so
            name = getattr(case.launch, "func", case.launch).__name__.strip("_")
            failed = Compiled(name, case.label, arch, 0, 0, 0, 0, "", f"does not compile: {error}"[:200])
            return {f"{name} {case.label}": failed}
    for kernel in seen:  # many cases launch the same small kernels
        if kernel.hash not in _MEASURED:
            _MEASURED[kernel.hash] = _measure(kernel, case.label, arch)
    return {kernel.hash: _MEASURED[kernel.hash] for kernel in seen}


def _measure(kernel: Any, label: str, arch: int) -> Compiled:
    built, used = kernel.metadata, usage(kernel.asm["cubin"])
    name, instruction = built.name.removesuffix("_kernel"), ""
    spills = spilled(disassemble(kernel.asm["cubin"])) if used["STACK"] else 0
    if "tt.dot" in kernel.asm["ttir"]:
        instruction = next((name for name in MATRIX_INSTRUCTIONS if name in kernel.asm["ptx"]), "none")
    return Compiled(name, label, arch, used["REG"], spills, built.shared, built.num_warps, instruction)


def _work(job: tuple[int, int]) -> dict[str, Compiled]:
    index, arch = job
    return compile_case(cases()[index], arch)


def run_gate(
    architectures: Sequence[int] = ARCHITECTURES, workers: int | None = None, everyday: bool = False
) -> list[Compiled]:
    """Compiles every case for every architecture, in parallel; each distinct kernel appears once.

    Args:
        architectures: such as 90 for sm_90.
        workers: processes; None: one per core, eight at most.
        everyday: only what a default call of the most common kind launches.
    """
    reason = missing()
    if reason:
        raise BackendError(f"the compile gate cannot run: {reason}")
    unknown = [arch for arch in architectures if arch not in SHARED_LIMIT]
    if unknown:
        raise BackendError(f"sm_{unknown[0]} is not known to the gate; there are: {sorted(SHARED_LIMIT)}")
    chosen = [index for index, case in enumerate(cases()) if case.everyday or not everyday]
    jobs = [(index, arch) for arch in architectures for index in chosen]
    workers = workers or min(8, os.cpu_count() or 1)
    found: dict[str, Compiled] = {}
    for rows in map(_work, jobs) if workers == 1 else in_processes(_work, jobs, workers, chunksize=4):
        found = found | rows | found  # the first one stays
    return list(found.values())


def passed(rows: Sequence[Compiled]) -> bool:
    return bool(rows) and not any(row.problems for row in rows)


def verdict(rows: Sequence[Compiled]) -> str:
    failed = [f"{r.kernel} {r.variant} sm_{r.arch}: {'; '.join(r.problems)}" for r in rows if r.problems]
    if failed:
        return f"{len(failed)} of {len(rows)} compiled kernels fail the gate:\n  " + "\n  ".join(failed)
    return f"{len(rows)} compiled kernels, 0 spills, shared memory below every limit"

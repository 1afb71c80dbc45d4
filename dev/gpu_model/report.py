"""The static estimate for a terminal, and the yardsticks beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dev.gpu_model.flash import compile_flash
from dev.gpu_model.model import ASSUMPTIONS, STALL, Estimate
from dev.gpu_model.sass import Code, read_code
from residua.hosts.gpus import Gpu

if TYPE_CHECKING:
    from rich.table import Table


def yardstick(gpu: Gpu, head_dim: int) -> Code:
    """The inner loop of a plain FlashAttention-2 style kernel, compiled the same way."""
    return read_code(compile_flash(gpu.arch, head_dim))


def instructions_per_64_keys(code: Code) -> float:
    """Of the first loop that multiplies; the tiles of both kernels hold 64 keys."""
    return float(code.products[0].instructions)


def flash_ms(found: Estimate, code: Code) -> float:
    """Dense attention by that kernel, in the terms of the same model."""
    rows, keys = 128, 64
    gpu, task, loop = found.gpu, found.task, code.products[0]
    trips = task.heads * -(-task.tokens // rows) * -(-task.tokens // keys)
    flops = 4 * rows * keys * task.head_dim
    turns = code.warps / 4
    cycles = max(turns * loop.instructions, flops / gpu.mma + turns * loop.dependent)
    return 1e3 * STALL * trips * cycles / gpu.processors / gpu.clock


def to_dict(found: Estimate, code: Code | None) -> dict[str, Any]:
    """The estimate with its yardstick, for JSON."""
    report = found.to_dict()
    if code is not None:
        own = next(k for k in found.kernels if k.kernel == "attend" and k.stage == "attention")
        report["flash_kernel"] = {
            "estimated_ms": flash_ms(found, code),
            "instructions_per_64_keys": instructions_per_64_keys(code),
            "attend_instructions_per_64_keys": own.instructions[0],
            "ratio": own.instructions[0] / instructions_per_64_keys(code),
        }
    return report


def tables(found: Estimate, code: Code | None) -> list[Table]:
    """Stages, kernels, and what they are compared with."""
    from rich.table import Table

    task, gpu = found.task, found.gpu
    title = f"{task.label}: {task.tokens:,} tokens x {task.heads} heads, density {task.density:g}, {gpu.label}"
    stages = Table(
        "stage",
        "launches",
        "GB",
        "TFLOP issued",
        "useful",
        "ms",
        "bound by",
        title=title,
        caption="a static estimate: not run on a GPU",
    )
    for row in found.stages:
        figures = (f"{x:.2f}" for x in (row.gigabytes, row.issued_tflop, row.useful_tflop, row.ms))
        stages.add_row(row.stage, str(row.launches), *figures, row.bound)
    stages.add_section()
    stages.add_row("call", str(found.launches), f"{found.gigabytes:.1f}", "", "", f"{found.estimated_ms:.1f}", "")
    kernels = Table(
        "kernel",
        "stage",
        "launches",
        "registers",
        "blocks/SM",
        "instructions per trip",
        "ms",
        "bound by",
        title="The kernels that take longest",
    )
    for kernel in found.kernels[:12]:
        loops = ", ".join(map(str, kernel.instructions)) or "-"
        kernels.add_row(
            kernel.kernel,
            kernel.stage,
            str(kernel.launches),
            str(kernel.registers),
            str(kernel.occupancy),
            loops,
            f"{kernel.ms:.2f}",
            kernel.bound,
        )
    return [stages, kernels, _comparison(found, code)]


def _comparison(found: Estimate, code: Code | None) -> Table:
    from rich.table import Table

    table = Table("dense attention", "ms", "speed-up of the call", title="Beside it")
    gpu = found.gpu
    rows = {
        f"at FlashAttention-2's rate ({gpu.dense:g} TFLOP/s)": found.dense_tflop / gpu.dense * 1e3,
        f"at the best published rate ({gpu.fast_dense:g} TFLOP/s)": found.dense_tflop / gpu.fast_dense * 1e3,
    }
    if code is not None:
        rows["a plain Triton kernel, in the same model"] = flash_ms(found, code)
    for name, ms in rows.items():
        table.add_row(name, f"{ms:.0f}", f"{ms / found.estimated_ms:.2f} x")
    return table


def lines(found: Estimate, code: Code | None) -> list[str]:
    """What does not fit a table: utilisation, memory, assumptions."""
    said = [
        f"matrix utilisation of the attention kernel: {found.tiles.utilisation:.3f}; "
        f"peak memory above q, k, v: {found.peak_gib:.2f} GiB; the host needs {found.host_ms:.1f} ms"
    ]
    if found.kept is not None:
        said.append(
            f"{found.regroup_every - 1} of {found.regroup_every} calls keep their groups: "
            f"{found.kept.estimated_ms:.1f} ms, {found.kept.launches} launches, "
            f"{found.kept.gigabytes:.1f} GB; on average {found.mean_ms:.1f} ms"
        )
    if code is not None:
        own = next(k for k in found.kernels if k.kernel == "attend" and k.stage == "attention").instructions[0]
        flash = instructions_per_64_keys(code)
        said.append(
            f"instructions per 64 keys and warp: {own}; a plain dense kernel: {flash:.0f} ({own / flash:.2f} x)"
        )
    return [*said, "assumed:", *(f"- {line}" for line in ASSUMPTIONS)]

"""Estimates a call without a GPU: `python -m dev.gpu_model --gpu h100 --model wan2.2`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dev.gate.compile import missing
from dev.gpu_model.flash import compile_flash, flash_ms
from dev.gpu_model.model import ASSUMPTIONS, Estimate, KernelCost, StageCost, Task, estimate
from dev.gpu_model.sass import Code
from residua.errors import BackendError, InputError
from residua.tools.cli.app import command, console, show, writable
from residua.tools.output import write_json
from residua.tools.plan.cost import count_forward, token_grid
from residua.tools.plan.request import find_model
from residua.tools.plan.speeds import find_gpu
from residua.tools.reports.table import Table
from residua.util.json_text import dumps

app = typer.Typer(add_completion=False)


@command(app)
def gpu_model(
    tokens: Annotated[int | None, typer.Option(min=64, help="Tokens of the call.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=8, help="Channels of a head.")] = None,
    density: Annotated[float, typer.Option(help="Share of dense attention that a call may spend.")] = 0.22,
    gpu: Annotated[str, typer.Option(help="h100, a100, 4090, 5090, b200, ...")] = "h100",
    model: Annotated[str | None, typer.Option(help="The call of a model, such as wan2.2.")] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Also write the figures to this file; - prints only them.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Estimate a warm call from counts and machine code."""
    target = None if json_path in (None, "-") else writable(Path(str(json_path)), force)
    reason = missing()
    if reason:
        raise BackendError(f"a static estimate compiles kernels: {reason}")
    task, machine = make_task(tokens, heads, head_dim, density, model), find_gpu(gpu)
    with console.status("tracing, routing and compiling ..."):
        found = estimate(task, machine)
        flash = compile_flash(machine.arch, task.head_dim) if task.head_dim in (64, 128) else None
    if json_path == "-":
        typer.echo(dumps(to_dict(found, flash), indent=2))
        return
    for table in tables(found, flash):
        show(table.rich())
    for line in lines(found, flash):
        console.print(line, markup=False, highlight=False)
    if target is not None:
        write_json(target, to_dict(found, flash))


def make_task(tokens: int | None, heads: int | None, head_dim: int | None, density: float, model: str | None) -> Task:
    """A model's call at its default size, or a call of the given shape; Wan2.2 if nothing is said."""
    if not 0 < density <= 1:
        raise InputError(f"density={density}: wanted a number above 0, up to 1")
    found = find_model(model or "wan2.2")
    whole = count_forward(found, math.prod(token_grid(found, found.size, found.frames))).keys
    shaped = any(value is not None for value in (tokens, heads, head_dim))
    kv_heads = found.kv_heads if found.kv_heads != found.heads and heads is None else None
    label = f"{found.name}{', changed' if shaped and model else ''}" if model or not shaped else "a call"
    return Task(tokens or whole, heads or found.heads, head_dim or found.head_dim, density, kv_heads, label)


def to_dict(found: Estimate, flash: Code | None) -> dict[str, Any]:
    """The estimate, with the plain dense kernel that it is compared with, for JSON."""
    report = found.to_dict()
    if flash is not None:
        own, plain = found.attend_instructions, flash.products[0].instructions
        report["flash_kernel"] = {
            "estimated_ms": flash_ms(found, flash),
            "instructions_per_64_keys": float(plain),
            "attend_instructions_per_64_keys": own,
            "ratio": own / plain,
        }
    return report


def tables(found: Estimate, flash: Code | None) -> list[Table]:
    """Stages, kernels, and what they are compared with."""
    task, gpu = found.task, found.gpu
    whole = ("call", str(found.launches), f"{found.gigabytes:.1f}", "", "", f"{found.estimated_ms:.1f}", "")

    def stage(row: StageCost) -> tuple[str, ...]:
        values = (row.gigabytes, row.issued_tflop, row.useful_tflop, row.ms)
        return row.stage, str(row.launches), *(f"{value:.2f}" for value in values), row.bound

    def kernel(row: KernelCost) -> tuple[str, ...]:
        counts = map(str, (row.launches, row.registers, row.occupancy))
        instructions = ", ".join(map(str, row.instructions)) or "-"
        return row.kernel, row.stage, *counts, instructions, f"{row.ms:.2f}", row.bound

    dense = {
        f"at FlashAttention-2's rate ({gpu.dense:g} TFLOP/s)": found.dense_tflop / gpu.dense * 1e3,
        f"at the best published rate ({gpu.fast_dense:g} TFLOP/s)": found.dense_tflop / gpu.fast_dense * 1e3,
    }
    if flash is not None:
        dense["a plain Triton kernel, in the same model"] = flash_ms(found, flash)
    return [
        Table(
            f"{task.label}: {task.tokens:,} tokens x {task.heads} heads, density {task.density:g}, {gpu.label}",
            ("stage", "launches", "GB", "TFLOP issued", "useful", "ms", "bound by"),
            (*map(stage, found.stages), whole),
            "a static estimate: not run on a GPU",
            "call",
        ),
        Table(
            "The kernels that take longest",
            ("kernel", "stage", "launches", "registers", "blocks/SM", "instructions per trip", "ms", "bound by"),
            tuple(map(kernel, found.kernels[:12])),
        ),
        Table(
            "Beside it",
            ("dense attention", "ms", "speed-up of the call"),
            tuple((name, f"{ms:.0f}", f"{ms / found.estimated_ms:.2f} x") for name, ms in dense.items()),
        ),
    ]


def lines(found: Estimate, flash: Code | None) -> list[str]:
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
    if flash is not None:
        own, plain = found.attend_instructions, flash.products[0].instructions
        said.append(f"instructions per 64 keys and warp: {own}; a plain dense kernel: {plain} ({own / plain:.2f} x)")
    return [*said, "assumed:", *(f"- {line}" for line in ASSUMPTIONS)]


if __name__ == "__main__":
    app()

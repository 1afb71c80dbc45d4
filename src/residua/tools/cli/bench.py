"""`residua bench`: how fast a call is, compared with dense attention and with the theoretical limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...util import json_text
from ..output import write_json
from ..reports.table import Table, number
from .app import PlainGroup, app, command, console, show, writable
from .options import BackendName, ForceFile, ReconstructionName, numbers, whole_numbers

if TYPE_CHECKING:
    from ..bench.attention import CallTimes

bench = typer.Typer(
    cls=PlainGroup, no_args_is_help=True, help="Measure speed, compared with dense attention and with the limit."
)
app.add_typer(bench, name="bench")

Heads = Annotated[int, typer.Option(min=1, help="Attention heads.")]
HeadDim = Annotated[int, typer.Option(min=8, help="Channels of a head.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16.")]
Repeats = Annotated[int, typer.Option(min=1, help="Interleaved repeats; the median is reported.")]


@command(bench, epilog="Example:  residua bench attention --tokens 16384 --heads 2 --density 0.22 --json out.json")
def attention(
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the call.")] = 16384,
    heads: Heads = 2,
    head_dim: HeadDim = 128,
    density: Annotated[float, typer.Option(help="Share of dense attention that a call may spend.")] = 0.22,
    dtype: Dtype = "fp32",
    concentration: Annotated[str, typer.Option(help="broad, medium or sparse heads.")] = "medium",
    reconstruction: ReconstructionName = "anchored",
    backend: BackendName = "auto",
    repeats: Repeats = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    force: ForceFile = False,
) -> None:
    """Measure one call: warm and cold, stage by stage, beside dense SDPA in the same process."""
    from ..bench.attention import CallCase, measure

    if json_path is not None:
        writable(json_path, force)
    task = CallCase(tokens, heads, head_dim, density, dtype, concentration, repeats, backend, reconstruction)
    with console.status("measuring ...") as status:
        row = measure(task, lambda what: status.update(f"measuring: {what} ..."))
    try:
        show(_table([row]).rich())
        show(_stages(row).rich())
    finally:  # whoever reads the table may have closed the pipe, as `head` does
        if json_path is not None:
            write_json(json_path, row.to_dict())


@command(bench, epilog="Example:  residua bench sweep --tokens 4096,8192,16384 --densities 0.22")
def sweep(
    tokens: Annotated[str, typer.Option(help="Token counts, comma separated.")] = "4096,8192,16384,32768,75600",
    densities: Annotated[str, typer.Option(help="Densities, comma separated.")] = "0.12,0.22,0.35",
    heads: Heads = 2,
    head_dim: HeadDim = 128,
    dtype: Dtype = "fp32",
    reconstruction: ReconstructionName = "anchored",
    backend: BackendName = "auto",
    repeats: Repeats = 3,
    out: Annotated[Path, typer.Option(help="Folder for sweep.json, sweep.png and stages.png.")] = Path("residua-sweep"),
    force: ForceFile = False,
) -> None:
    """Measure calls of many lengths and densities, and draw speed-up and stage breakdown."""
    from ..bench import sweep as sweeping
    from ..bench.attention import CallCase, measure
    from .progress import call_bar

    files = [writable(out / name, force) for name in ("sweep.json", "sweep.png", "stages.png")]
    base = CallCase(
        heads=heads, head_dim=head_dim, dtype=dtype, backend=backend, repeats=repeats, reconstruction=reconstruction
    )
    todo = sweeping.tasks(base, whole_numbers("tokens", tokens), numbers("densities", densities))
    rows: list[CallTimes] = []
    with call_bar() as watch:
        for task in todo:
            watch(len(rows), len(todo), f"{task.tokens:,} tokens at {task.density:g}")
            rows.append(measure(task))
            write_json(files[0], [row.to_dict() for row in rows])
        watch(len(rows), len(todo), "measured")
    sweeping.write_drawings(sweeping.drawings(rows), out)
    show(_table(rows).rich())
    console.print(f"wrote {', '.join(map(str, files))}")


@command(bench, epilog="Example:  residua bench synthetic --tokens 16384 --density 0.12")
def synthetic(
    tokens: Annotated[int, typer.Option(min=64, help="Video tokens of a call.")] = 8192,
    heads: Heads = 2,
    head_dim: HeadDim = 128,
    density: Annotated[float, typer.Option(help="Share of dense attention that a call may spend.")] = 0.22,
    reconstruction: ReconstructionName = "anchored",
    backend: BackendName = "auto",
) -> None:
    """Run the operator on broad, medium and sparse synthetic heads and compare it with dense attention."""
    from ..bench.attention import CallCase, measure
    from ..synthetic import CONCENTRATIONS

    base = CallCase(tokens, heads, head_dim, density, backend=backend, repeats=3, reconstruction=reconstruction)
    rows = []
    with console.status("measuring ...") as status:
        for name in CONCENTRATIONS:
            status.update(f"measuring a {name} head ...")
            task = replace(base, concentration=name)
            row, dropped = measure(task), measure(replace(task, repeats=1, reconstruction="none"))
            cells = {
                "keys of 95% mass": f"{task.key_fraction:.1%}",
                "dense ms": f"{row.dense_ms:.0f}",
                "sparse ms": f"{row.call_ms:.0f}",
                "cold ms": f"{row.cold_ms:.0f}",
                "speed -up": f"{row.speedup:.2f}",
                "density": f"{row.density:.1%}",
                "error mean": f"{row.mean_error:.3f}",
                "error p99": f"{row.p99_error:.3f}",
                "mean, none": f"{dropped.mean_error:.3f}",
            }
            rows.append((name, *cells.values()))
    title = f"{reconstruction} against dense attention: {heads} heads x {head_dim}, density {density:g}"
    show(Table(title, ("head", *cells), tuple(rows)).rich())
    console.print(
        f"{tokens} tokens, backend {row.backend}. Errors are relative to dense attention, per row: the "
        f"output is an approximation. The speed-up can be {1 / density:.2f}x at most."
    )


@command(bench, epilog="Example:  residua bench gpu --tokens 75600 --heads 24 --json gpu.json")
def gpu(
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the call.")] = 75600,
    heads: Heads = 24,
    head_dim: HeadDim = 128,
    density: Annotated[float, typer.Option(help="Share of dense attention that a call may spend.")] = 0.22,
    dtype: Dtype = "bf16",
    repeats: Repeats = 10,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Also write the figures to this file; - prints only them.")
    ] = None,
    force: ForceFile = False,
) -> None:
    """Measure every backend on an NVIDIA GPU (send us the JSON)."""
    from ..bench import gpu as measuring

    target = None if json_path in (None, "-") else writable(Path(str(json_path)), force)
    device = measuring.require_gpu()
    task = measuring.GpuCase(tokens, heads, head_dim, density, dtype, repeats=repeats)
    with console.status("measuring ...") as status:
        report = measuring.measure(task, device, lambda what: status.update(f"measuring: {what} ..."))
    if json_path == "-":
        typer.echo(json_text.dumps(report, indent=2))
        return
    for table in measuring.tables(report):
        show(table.rich())
    if target is not None:
        write_json(target, report)


def _table(rows: list[CallTimes]) -> Table:
    cells = {
        "density": [f"{row.task.density:.2f}" for row in rows],
        "dense ms": [f"{row.dense_ms:.0f}" for row in rows],
        "call ms": [f"{row.call_ms:.0f}" for row in rows],
        "speed -up": [f"{row.speedup:.2f}" for row in rows],
        "in a run": [f"{row.run_speedup:.2f}" for row in rows],
        "limit": [f"{row.limit:.2f}" for row in rows],
        "kernel /limit": [f"{row.kernel_over_limit:.2f}" for row in rows],
        "not kernel": [f"{row.overhead:.0%}" for row in rows],
        "error mean": [f"{row.mean_error:.3f}" for row in rows],
        "error p99": [f"{row.p99_error:.3f}" for row in rows],
        "mem. /qkvo": [number(row.memory_ratio, "{:.2f}") for row in rows],
    }
    title = f"{rows[0].backend}, {rows[0].threads} threads, {rows[0].cpu}"
    return Table.filled(title, "tokens", [f"{row.task.tokens:,}" for row in rows], cells)


def _stages(row: CallTimes) -> Table:
    total = sum(row.stages_ms.values())
    lines = ((name, f"{ms:.1f}", f"{ms / total:.1%}") for name, ms in row.stages_ms.items())
    return Table("Where the time of a warm call goes", ("stage", "ms", "share"), tuple(lines))

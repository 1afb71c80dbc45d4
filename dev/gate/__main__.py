"""Compiles every GPU kernel for every architecture, without a GPU: `python -m dev.gate --page docs/gpu-kernels.md`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dev.gate.compile import SHARED_LIMIT, Compiled, passed, run_gate, verdict
from residua.tools.cli.app import command, console
from residua.tools.reports.table import Table
from residua.util.files import write_text_whole

app = typer.Typer(add_completion=False)


@command(app)
def gate(page: Annotated[Path | None, typer.Option(help="Write the table here.")] = None) -> None:
    """Compile every GPU kernel for every architecture; needs no GPU."""
    with console.status("compiling the GPU kernels ..."):
        rows = run_gate()
    if page is not None:
        write_text_whole(page, markdown(rows))
    elif console.is_terminal:
        console.print(table(rows).rich(colours={"FAIL": "red"}))
    console.print(verdict(rows), markup=False)
    if not passed(rows):
        raise typer.Exit(1)


def table(rows: Sequence[Compiled]) -> Table:
    """A row for each kernel and variant, a column for each GPU."""
    architectures = sorted({row.arch for row in rows})
    worst: dict[tuple[str, str], dict[int, Compiled]] = {}
    for row in sorted(rows, key=lambda r: r.kernel):
        found = worst.setdefault((row.kernel, row.variant), {})
        # a variant may be compiled with several tiles: one that fails, or the most registers
        found[row.arch] = max(found.get(row.arch, row), row, key=lambda r: (bool(r.problems), r.registers))
    lines = [(*names, *(_cell(found.get(arch)) for arch in architectures)) for names, found in worst.items()]
    columns = ("kernel", "variant", *(f"sm_{arch}" for arch in architectures))
    return Table(verdict(rows).splitlines()[0], columns, tuple(lines))


def _cell(row: Compiled | None) -> str:
    if row is None:
        return ""
    if row.problems:
        return f"FAIL: {'; '.join(row.problems)}"
    return ", ".join(filter(None, (f"{row.registers} regs", f"{row.shared / 1024:.1f} KiB", row.instruction)))


def markdown(rows: Sequence[Compiled]) -> str:
    """The page docs/gpu-kernels.md."""
    import triton

    limits = ", ".join(f"sm_{arch} {SHARED_LIMIT[arch] // 1024} KiB" for arch in sorted({row.arch for row in rows}))
    return f"""# The GPU kernels, compiled

Written by `python -m dev.gate --page docs/gpu-kernels.md` with Triton {triton.__version__}. Every kernel is compiled,
not run, as it is launched at 75,600 tokens and 40 heads: registers per thread, shared memory per block, and the
instruction that multiplies; of a kernel with several tiles, the one with the most registers. Limits of shared memory:
{limits}.

{table(rows).markdown()}"""


if __name__ == "__main__":
    app()

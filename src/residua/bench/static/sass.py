"""What a compiled kernel consists of: its machine code, disassembled, and the instructions of every loop."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BackendError
from ...execution.triton.gate import tool

MIN_LOOP = 12  # instructions; shorter loops are waits and searches
# FLOPs of a matrix instruction per warp, from the shape in its name (HGMMA.64x64x16: a warp group of 4 warps)
SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
MMA_SHAPES = {"1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32)}
# instructions that wait for a product before they can start: the softmax, or another reduction of the scores
DEPENDENT = (
    "FFMA",
    "FMUL",
    "FADD",
    "FMNMX",
    "MUFU",
    "FSEL",
    "FSETP",
    "F2F",
    "SHFL",
    "HADD2",
    "HMUL2",
    "HFMA2",
)


@dataclass(frozen=True)
class Loop:
    """One loop of a kernel, without the loops inside it."""

    depth: int  # 1 is outermost
    instructions: int  # that one warp issues per trip
    dependent: int  # of these, arithmetic on the results of matrix instructions
    special: int  # of these, exponentials and other special functions
    flops: int  # of the matrix instructions that one warp issues per trip


@dataclass(frozen=True)
class Code:
    """The machine code of one compiled kernel."""

    name: str
    registers: int
    shared: int
    warps: int
    instructions: int  # in all
    loops: tuple[Loop, ...]  # in program order, an outer loop before its inner ones

    @property
    def products(self) -> tuple[Loop, ...]:
        """The loops that multiply matrices."""
        return tuple(loop for loop in self.loops if loop.flops)


def read_code(kernel: Any, registers: int) -> Code:
    """Disassembles what Triton compiled.

    Args:
        kernel: a compiled Triton kernel, with its `cubin`.
        registers: per thread, as the compile gate measured them.
    """
    instructions, labels = _parse(_disassemble(kernel.asm["cubin"]))
    found = _loops(instructions, labels)
    rows = []
    for start, stop in found:
        inner = [
            other for other in found if other != (start, stop) and start <= other[0] and other[1] <= stop
        ]
        own = [
            op
            for place, op in enumerate(instructions)
            if start <= place <= stop and not _inside(place, inner)
        ]
        depth = sum(a <= start and stop <= b for a, b in found)
        rows.append(_loop(depth, [op for op, _ in own]))
    return Code(
        kernel.metadata.name.removesuffix("_kernel"), registers, kernel.metadata.shared,
        kernel.metadata.num_warps, len(instructions), tuple(rows),
    )  # fmt: skip


def _loop(depth: int, names: list[str]) -> Loop:
    count = Counter(name.split(".")[0] for name in names)
    return Loop(
        depth,
        len(names),
        sum(count[name] for name in DEPENDENT),
        sum(name.startswith("MUFU") for name in names),
        sum(_mma_flops(name) for name in names),
    )


def _mma_flops(name: str) -> int:
    """FLOPs that one warp's share of a matrix instruction does; 0 for any other instruction."""
    if name.startswith("HGMMA") or name.startswith("QGMMA"):
        shape = SHAPE.search(name)
        rows, columns, depth = (int(n) for n in shape.groups()) if shape else (0, 0, 0)
        return 2 * rows * columns * depth // 4
    if name.startswith("HMMA") or name.startswith("QMMA"):
        for key, (rows, columns, depth) in MMA_SHAPES.items():
            if f".{key}." in name:
                return 2 * rows * columns * depth
    return 0


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        shown = subprocess.run([tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True)
    if shown.returncode:
        raise BackendError(f"nvdisasm failed: {shown.stderr.strip()[:200]}; update Triton")
    return shown.stdout


def _parse(text: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Instructions as (name, operands), and the place of every label."""
    instructions: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = re.match(r"^(\.L_\S+):", line.strip())
        if label:
            labels[label[1]] = len(instructions)
            continue
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.a-z]+)(.*?);", line)
        if found:
            instructions.append((found[1], found[2]))
    return instructions, labels


def _loops(instructions: list[tuple[str, str]], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last instruction of every loop: a branch back. Branches to one place are one loop."""
    ends: dict[int, int] = {}
    for place, (name, operands) in enumerate(instructions):
        target = re.search(r"(\.L_x_\d+)", operands) if name.startswith("BRA") else None
        if target and target[1] in labels and labels[target[1]] <= place:
            start = labels[target[1]]
            ends[start] = max(place, ends.get(start, 0))
    return sorted((start, stop) for start, stop in ends.items() if stop - start + 1 >= MIN_LOOP)


def _inside(place: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= place <= stop for start, stop in spans)

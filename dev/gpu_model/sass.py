"""What a compiled kernel consists of: its machine code, disassembled, and the instructions of every loop."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dev.gate.cubin import disassemble, usage

MIN_LOOP = 12  # instructions; shorter loops are waits and searches
MATRIX = re.compile(r"^(HMMA|HGMMA|QMMA|QGMMA|UTC\w*MMA)")
JUMPS = ("BRA", "CALL.REL.NOINC")  # the assembler writes some branches that leave a loop as calls
# instructions that wait for a product before they can start: the softmax, or another reduction of the scores
DEPENDENT = ("FFMA", "FMUL", "FADD", "FMNMX", "MUFU", "FSEL", "FSETP", "F2F", "SHFL", "HADD2", "HMUL2", "HFMA2")


@dataclass(frozen=True)
class Loop:
    """One loop of a kernel, without the loops inside it."""

    depth: int  # 1 is outermost
    instructions: int  # that one warp issues per trip
    dependent: int  # of these, arithmetic on the results of matrix instructions
    special: int  # of these, exponentials and other special functions
    matrix: int  # of these, matrix instructions; loops inside it are not counted
    multiplies: bool  # whether it, or a loop inside it, has any


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
        """The loops that multiply matrices, themselves or inside."""
        return tuple(loop for loop in self.loops if loop.multiplies)

    @property
    def straight(self) -> int:
        """Instructions outside of all loops."""
        return self.instructions - sum(loop.instructions for loop in self.loops)


def read_code(kernel: Any) -> Code:
    """Disassembles what Triton compiled: a kernel with its `cubin`."""
    registers = usage(kernel.asm["cubin"])["REG"]
    instructions, labels = _parse(disassemble(kernel.asm["cubin"]))
    bodies = _natural_loops(instructions, labels)
    rows = []
    for _, body in bodies:
        inner = set().union(*(other for _, other in bodies if other < body))
        depth = sum(body <= other for _, other in bodies)
        names = [instructions[place][0] for place in sorted(body - inner)]
        every = [instructions[place][0] for place in body]
        if len(every) >= MIN_LOOP:
            rows.append(_loop(depth, names, any(MATRIX.match(name) for name in every)))
    built = kernel.metadata
    name = built.name.removesuffix("_kernel")
    return Code(name, registers, built.shared, built.num_warps, len(instructions), tuple(rows))


def _loop(depth: int, names: list[str], multiplies: bool) -> Loop:
    count = Counter(name.split(".")[0] for name in names)
    dependent = sum(count[name] for name in DEPENDENT)
    special = sum(name.startswith("MUFU") for name in names)
    matrix = sum(bool(MATRIX.match(name)) for name in names)
    return Loop(depth, len(names), dependent, special, matrix, multiplies)


def _parse(text: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Instructions as (name, operands), and the place of every label."""
    instructions: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = re.match(r"^(\.L_\S+):", line.strip())
        if label:
            labels[label[1]] = len(instructions)
            continue
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.a-z]+)(.*?);", line)
        if found:
            # a branch or exit under a condition may also go on; its name says so. From sm_100 on the
            # condition may be the first operand
            conditional = found[2].startswith((*JUMPS, "EXIT")) and (found[1] or re.match(r"\s*!?U?P\d", found[3]))
            instructions.append((found[2] + (".IF" if conditional else ""), found[3]))
    return instructions, labels


def _natural_loops(instructions: list[tuple[str, str]], labels: dict[str, int]) -> list[tuple[int, frozenset[int]]]:
    """Header and body of every loop, in program order. Waits that the compiler moved behind the end of the
    code branch back as well; they are told apart by dominance: a loop's header lies on every way to its
    branch."""
    edges = _edges(instructions, labels)
    before: list[list[int]] = [[] for _ in edges]
    for place, targets in enumerate(edges):
        for target in targets:
            before[target].append(place)
    code, loops = _reached(edges, 0), []
    for header, sources in enumerate(before):
        if header > 0 and len(sources) < 2:
            continue  # a loop's header is entered from outside, and again from inside
        dominated = code - _reached(edges, 0, header)
        bodies = [_reached(before, place, header) for place in sources if place in dominated]
        if bodies:
            loops.append((header, frozenset({header}.union(*bodies))))
    return loops


def _reached(edges: list[list[int]], start: int, closed: int | None = None) -> set[int]:
    """All places that can be reached from one of them, on ways that avoid the closed one."""
    found: set[int] = set()
    waiting = [start]
    while waiting:
        place = waiting.pop()
        if place != closed and place not in found:
            found.add(place)
            waiting += edges[place]
    return found


def _edges(instructions: list[tuple[str, str]], labels: dict[str, int]) -> list[list[int]]:
    """Where the code goes on after each instruction."""
    found = []
    for place, (name, operands) in enumerate(instructions):
        after = [place + 1] if place + 1 < len(instructions) else []
        target = re.search(r"(\.L_x_\d+)", operands) if name.startswith(JUMPS) else None
        if name == "EXIT":
            after = []
        if target and target[1] in labels and labels[target[1]] < len(instructions):
            goal = labels[target[1]]
            after = [goal, *after] if name.endswith(".IF") else [goal]
        found.append(after)
    return found

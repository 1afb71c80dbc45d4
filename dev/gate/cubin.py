"""What a compiled kernel is made of, read with the tools of the CUDA toolkit that come with Triton."""

import re
import subprocess
import tempfile
from pathlib import Path

from residua.errors import BackendError


def tool(name: str) -> str:
    """Path of a program of the CUDA toolkit that comes with Triton."""
    from triton.backends import nvidia

    return str(Path(nvidia.__file__).parent / "bin" / name)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of stack of a compiled kernel."""
    shown = _run(["cuobjdump", "-res-usage"], cubin)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", shown)}
    if len(found) != 2:
        raise BackendError(f"cuobjdump reports no registers or stack: {shown[:200]!r}; update Triton")
    return found


def disassemble(cubin: bytes) -> str:
    """The machine code as text, one instruction per line."""
    return _run(["nvdisasm", "-c"], cubin)


def spilled(code: str) -> int:
    """Bytes that a thread stores to its stack and loads from it, each instruction counted once. They are read
    from the machine code itself: another run of the assembler may spill elsewhere than Triton's own did."""
    widths = re.findall(r"\s(?:STL|LDL)(?:\.LU)?(?:\.(64|128))?(?:\.LU)?\s", code)
    return sum(int(bits or 32) // 8 for bits in widths)


def _run(command: list[str], cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        shown = subprocess.run([tool(command[0]), *command[1:], str(path)], capture_output=True, text=True, check=False)
    if shown.returncode:
        raise BackendError(f"{command[0]} failed: {shown.stderr.strip()[:200]}; update Triton")
    return shown.stdout + shown.stderr

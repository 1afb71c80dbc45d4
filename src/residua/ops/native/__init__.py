"""The CPU backend in C++: `backend` and the files of its subjects call the kernels.

`library` loads the shared library, `abi` and `arguments` hand tensors over, `threads` keeps torch's threads
out of the way. The C++ sources are in `src/`.
"""

from __future__ import annotations

from .backend import NativeBackend
from .library import isa

__all__ = ["NativeBackend", "isa"]

"""The CPU backend in C++: `backend` calls the kernels, `abi` loads the library, `threads` keeps torch's
threads out of their way. The sources are in `src/`."""

from __future__ import annotations

from .backend import NativeBackend, isa

__all__ = ["NativeBackend", "isa"]

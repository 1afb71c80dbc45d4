"""The CPU backend in C++: fused kernels for AVX-512, AVX2 and any other processor, chosen when it loads.

Each file of a subject calls its kernels; `library` loads the shared library and keeps torch's threads out of the way,
`abi` hands tensors over. The C++ sources are in `src/`; the library is built with the package and loaded through a
plain C interface. Work is cut into tasks whose results never depend on the number of threads: they are bit-identical on
repeats and across thread counts. Memory beyond the outputs is a few hundred KiB per thread.
"""

from typing import ClassVar

from ..backend import BACKENDS
from .attention import NativeAttention
from .grouping import NativeCells, NativeGrouping
from .library import isa
from .matrices import NativeMatrices
from .residual import NativeResidual
from .summary import NativeSummary

__all__ = ["NativeBackend", "isa"]


@BACKENDS.register
class NativeBackend(NativeCells, NativeGrouping, NativeSummary, NativeAttention, NativeResidual, NativeMatrices):
    """Every subject in the native library but judging, which is small."""

    name: ClassVar[str] = "native"
    about: ClassVar[str] = "fused C++ kernels for the CPU"
    preference: ClassVar[int] = 100
    deterministic: ClassVar[bool] = True
    adds_by_slot: ClassVar[bool] = True

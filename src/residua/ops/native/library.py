"""Loads the native library, checks that it is the one this package was written for, and calls it for a backend."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

import torch

from ...errors import BackendError, RouteError
from ..backend import Backend
from . import abi

_LOCAL = threading.local()


def threads() -> int:
    """How many threads a kernel may use: torch's setting, as it was before `torch_on_one_thread`."""
    return getattr(_LOCAL, "threads", None) or torch.get_num_threads()


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Inside this block torch's operations of the calling thread run on that thread alone.

    A call alternates between native kernels and small torch operations. After an operation that torch spreads over
    its OpenMP threads these spin for some milliseconds on the cores that the next kernel needs: short calls take a
    sixth longer. Other threads of the process do not notice, because OpenMP and MKL keep these settings per thread.
    Does nothing where torch is built on something else.
    """
    switches = _switches()
    before = torch.get_num_threads()
    if switches is None or before == 1 or getattr(_LOCAL, "threads", None):
        yield
        return
    set_openmp, set_mkl = switches
    mkl_before = set_mkl(1)  # 0: whatever the process uses
    set_openmp(1)
    _LOCAL.threads = before
    try:
        yield
    finally:
        _LOCAL.threads = None
        set_openmp(before)
        set_mkl(mkl_before)


@cache
def _switches() -> tuple[Callable[[int], int], Callable[[int], int]] | None:
    """`omp_set_num_threads` and `MKL_Set_Num_Threads_Local` of the libraries that torch uses."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library.omp_set_num_threads, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None


# Best first; the index is the number that the library takes.
ISAS = ("avx512bf16", "avx512", "avx2", "generic")
ISA_VARIABLE = "RESIDUA_NATIVE_ISA"


class Library:
    """The loaded library, or in `missing` the reason why there is none."""

    def __init__(self, folder: Path) -> None:
        self.missing: str | None = None
        self.cdll: ctypes.CDLL | None = None
        try:
            self.cdll = self._load(folder)
        except BackendError as error:
            self.missing = str(error)

    @staticmethod
    def _load(folder: Path) -> ctypes.CDLL:
        path, note = folder / "_native.so", folder / "_native.txt"
        if not path.exists():
            reason = note.read_text().strip() if note.exists() else "reinstall residua with a C++17 compiler"
            raise BackendError(f"the native library was not built: {reason}")
        try:
            _check_whole(path)
            cdll = ctypes.CDLL(str(path))
            _check_interface(cdll)
        except (OSError, AttributeError) as error:
            raise BackendError(f"the native library does not load: {error}; reinstall residua") from error
        cdll.residua_isa.restype = ctypes.c_char_p
        return cdll

    @cached_property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that run on this machine, best first."""
        cdll = self.cdll
        return () if cdll is None else tuple(name for number, name in enumerate(ISAS) if cdll.residua_isa(number))

    def run(self, name: str, args: abi.Args, isa: int) -> None:
        """Calls `residua_<name>`; ctypes releases the GIL meanwhile."""
        if self.cdll is None:
            raise BackendError(self.missing or "the native library is not loaded")
        status = getattr(self.cdll, f"residua_{name}")(ctypes.byref(args), isa, threads())
        if status == 1:
            raise MemoryError(f"native {name}: no memory for a thread's scratch space")
        if status == 2:
            raise RouteError(
                f"native {name}: a partition contradicts itself; offsets must ascend from 0 to at most N, "
                "indices lie in 0..N-1 and slots in -1..T-1. Build it with Partition.from_labels"
            )
        if status:
            raise BackendError(f"native {name}: status {status}")


def _check_whole(path: Path) -> None:
    """The loader of Linux maps a file that was cut short and the process dies of SIGBUS. The section table of
    an ELF file is its last part, so the header says how long the file must be."""
    with path.open("rb") as stream:
        header = stream.read(64)
    if header[:4] != b"\x7fELF" or len(header) < 64:
        return  # no ELF file of 64 bits: the loader itself says what it is
    (table,) = struct.unpack_from("=Q", header, 0x28)
    entry, count = struct.unpack_from("=HH", header, 0x3A)
    size, wanted = path.stat().st_size, table + entry * count
    if size < wanted:
        raise OSError(f"{path} has {size} bytes of {wanted}: it was cut short")


def _check_interface(cdll: ctypes.CDLL) -> None:
    """A struct of another size would make the library read beside its arguments: then it is not used."""
    version = cdll.residua_abi_version()
    if version != abi.VERSION:
        raise BackendError(
            f"the native library speaks version {version}, this package {abi.VERSION}; reinstall residua"
        )
    cdll.residua_structs.restype = ctypes.c_char_p
    names, sizes = (field := cdll.residua_structs().decode().split())[::2], field[1::2]
    wanted, got = abi.structs(), dict(zip(names, map(int, sizes), strict=True))
    for name in sorted(wanted.keys() | got.keys()):
        if wanted.get(name, 0) != got.get(name, 0):
            raise BackendError(
                f"{name} has {got.get(name, 0)} bytes in the native library, {wanted.get(name, 0)} in this package; "
                "reinstall residua"
            )


@cache
def load() -> Library:
    """The library of this package, loaded once."""
    return Library(Path(__file__).parent)


def choose_isa(lib: Library, wanted: str | None = None) -> str:
    """The best instruction set of this machine, or the one that is asked for, here or in the environment."""
    asked = wanted or os.environ.get(ISA_VARIABLE)
    if not asked:
        return lib.isas[0]
    if asked not in lib.isas:
        raise BackendError(f"{'isa' if wanted else ISA_VARIABLE}={asked!r}: this machine runs {', '.join(lib.isas)}")
    return asked


def isa() -> str | None:
    """The instruction set in use, or None where the library is missing."""
    lib = load()
    return None if lib.missing else choose_isa(lib)


class NativeBase(Backend):
    """A backend that runs its primitives in the native library; the primitives are in the subclasses."""

    devices: ClassVar[tuple[str, ...] | None] = ("cpu",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, int]] = (8, 256)

    def __init__(self, isa: str | None = None) -> None:
        self._isa = isa

    def unavailable(self) -> str | None:
        lib = load()
        if lib.missing:
            return lib.missing
        try:
            self._isa_number()
        except BackendError as error:
            return str(error)
        return None

    @contextmanager
    def session(self) -> Iterator[NativeBase]:
        with torch_on_one_thread():
            yield self

    def _isa_number(self) -> int:
        return ISAS.index(choose_isa(load(), self._isa))

    def _run(self, name: str, args: abi.Args) -> None:
        load().run(name, args, self._isa_number())

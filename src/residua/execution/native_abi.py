"""The native library as seen from Python: the structs of `native/abi.h`, field by field, and its loading."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BackendError, RouteError
from .own_threads import threads

ABI_VERSION = 3
ISAS = (
    "avx512bf16",
    "avx512",
    "avx2",
    "portable",
)  # best first; the index is the number that the library takes
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ISA_VARIABLE = "RESIDUA_NATIVE_ISA"


class View(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64))

    @classmethod
    def of(cls, x: Tensor, unit: int = 1) -> View:
        """A [B, H, N, D] tensor whose last dimension is contiguous; strides in elements times `unit`."""
        return cls(x.data_ptr(), x.stride(0) * unit, x.stride(1) * unit, x.stride(2) * unit)


class Groups(ctypes.Structure):
    _fields_ = (
        ("order", c_void_p),
        ("offsets", c_void_p),
        ("tokens", c_int64),
        ("groups", c_int64),
    )


class Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "dim", "value_dim")
    )


class AttendArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("query", Groups),
        ("kv", Groups),
        *((name, View) for name in ("q", "k", "v", "out")),
        *((name, c_void_p) for name in ("lse", "cells", "extra_keys", "extra_values", "extra_weight")),
        *((name, c_void_p) for name in ("basis", "origin", "curve", "slope")),
        *((name, c_int64) for name in ("extra", "rank")),
        *((name, c_float) for name in ("scale", "bend_most")),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    )


class RowsArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        *((name, View) for name in ("q", "k", "v", "out")),
        ("key_mask", c_void_p),
        ("partial", c_void_p),
        ("block_rows", c_int64),
        ("chunks", c_int64),
        ("kept", c_void_p),
        ("labels", c_void_p),
        ("groups", c_int64),
        ("part", c_void_p),
        ("part_lse", c_void_p),
        ("scale", c_float),
        ("dtype", c_int32),
        ("pad", c_int32),
    )


class MassArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("kv", Groups),
        ("anchors", c_void_p),
        ("k", View),
        ("mass", c_void_p),
        ("task_groups", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
    )


class SlotsArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("kv", Groups),
        ("anchors", c_void_p),
        *((name, View) for name in ("k", "v")),
        *((name, c_void_p) for name in ("slots", "log_mass", "keys", "values")),
        ("count", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
    )


class CovarianceArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("kv", Groups),
        *((name, View) for name in ("x", "v")),
        *((name, c_void_p) for name in ("covariance", "variance")),
        ("rank", c_int64),
        *((name, c_int32) for name in ("dtype", "pad")),
    )


class KmeansArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "tokens", "rank", "groups")),
        *((name, c_void_p) for name in ("x", "centres", "valid", "labels", "means", "sizes")),
    )


class MeansArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("groups", Groups),
        ("x", View),
        ("means", c_void_p),
        ("dtype", c_int32),
        ("pad", c_int32),
    )


class GatherArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "tokens", "rows", "row_bytes")),
        ("x", View),
        ("order", c_void_p),
        ("out", c_void_p),
    )


class ProjectArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("x", View),
        ("factor", c_void_p),
        ("out", c_void_p),
        ("rank", c_int64),
        ("rms_floor", c_float),
        ("normalise", c_int32),
        ("dtype", c_int32),
        ("pad", c_int32),
    )


class AffineArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("x", View),
        ("out", View),
        *((name, c_void_p) for name in ("left", "right", "bias")),
        ("rank", c_int64),
        ("out_dtype", c_int32),
        ("pad", c_int32),
    )


class EigenArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("count", "size")),
        *((name, c_void_p) for name in ("matrix", "values", "vectors")),
    )


class FitArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "rows", "dim", "rank")),
        *((name, c_double) for name in ("ridge", "feature_eps", "leverage_most", "energy_least")),
        *((name, c_void_p) for name in ("x", "residual", "weights", "left", "right", "bias", "left_out")),
    )


class FiniteArgs(ctypes.Structure):
    _fields_ = (("count", c_int64), ("x", c_void_p), ("finite", c_void_p))


class SortArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "tokens", "groups")),
        *((name, c_void_p) for name in ("labels", "order", "offsets")),
    )


class MomentArgs(ctypes.Structure):
    _fields_ = (
        ("shape", Shape),
        ("x", View),
        *((name, c_void_p) for name in ("counted", "moment")),
        *((name, c_int32) for name in ("centred", "dtype")),
    )


class CentralArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "tokens", "rank", "groups", "count")),
        *((name, c_void_p) for name in ("x", "labels", "rows")),
    )


class SpendArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "query_groups", "kv_groups", "passes")),
        *(
            (name, c_void_p)
            for name in ("log_share", "log_sizes", "query_sizes", "kv_sizes", "budget", "cells")
        ),
    )


class Library:
    """The loaded library, or in `missing` the reason why there is none."""

    def __init__(self, folder: Path) -> None:
        self.missing: str | None = None
        self.handle: ctypes.CDLL | None = None
        try:
            self.handle = self._load(folder)
        except BackendError as error:
            self.missing = str(error)

    @staticmethod
    def _load(folder: Path) -> ctypes.CDLL:
        path, note = folder / "_native.so", folder / "_native.txt"
        if not path.exists():
            reason = note.read_text().strip() if note.exists() else "reinstall residua with a C++17 compiler"
            raise BackendError(f"the native library was not built: {reason}")
        try:
            handle = ctypes.CDLL(str(path))
            version = handle.residua_abi_version()
        except (OSError, AttributeError) as error:
            raise BackendError(f"the native library does not load: {error}; reinstall residua") from error
        if version != ABI_VERSION:
            raise BackendError(
                f"the native library speaks version {version}, this package {ABI_VERSION}; reinstall residua"
            )
        handle.residua_isa.restype = ctypes.c_char_p
        return handle

    @cached_property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that run on this machine, best first."""
        handle = self.handle
        if handle is None:
            return ()
        return tuple(name for number, name in enumerate(ISAS) if handle.residua_isa(number))

    def run(self, name: str, args: ctypes.Structure, isa: int) -> None:
        """Calls `residua_<name>`; ctypes releases the GIL meanwhile."""
        if self.handle is None:
            raise BackendError(self.missing or "the native library is not loaded")
        status = getattr(self.handle, f"residua_{name}")(ctypes.byref(args), isa, threads())
        if status == 1:
            raise MemoryError(f"native {name}: no memory for a thread's scratch space")
        if status == 2:
            raise RouteError(
                f"native {name}: a partition contradicts itself; offsets must ascend from 0 to at most N, "
                "indices lie in 0..N-1 and slots in -1..T-1. Build it with Partition.from_labels"
            )
        if status:
            raise BackendError(f"native {name}: status {status}")


@cache
def library() -> Library:
    return Library(Path(__file__).parent)


def choose_isa(lib: Library, wanted: str | None = None) -> str:
    """The best instruction set of this machine, or the one that is asked for, here or in the environment."""
    asked = wanted or os.environ.get(ISA_VARIABLE)
    if not asked:
        return lib.isas[0]
    if asked not in lib.isas:
        source = "isa" if wanted else ISA_VARIABLE
        raise BackendError(f"{source}={asked!r}: this machine runs {', '.join(lib.isas)}")
    return asked

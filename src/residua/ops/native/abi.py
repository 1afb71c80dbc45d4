"""The arguments of the native library as seen from Python: the structs of `src/abi.h`, field by field, and tensors as
they hold them."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import RouteError
from ...types import Partition

VERSION = 8
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the numbers that the library takes


def row_major(x: Tensor) -> Tensor:
    """`x` with the elements of a row side by side; the kernels read any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def floats(x: Tensor) -> Tensor:
    """`x` in fp32 and contiguous."""
    return x.float().contiguous()


def new_floats(*shape: int) -> Tensor:
    """Room for fp32 results, whatever torch's default dtype is: the library writes four bytes per number."""
    return torch.empty(shape, dtype=torch.float32)


def _fields(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class Args(ctypes.Structure):
    """A struct that is built by keyword, every field of it: one that is forgotten is an error, not a zero.

    A tensor becomes its address or a `View`, a partition `Groups`, a dtype its number. What is not laid out as the
    library reads it is copied first, so that room for results must be contiguous. The struct holds what it points to.
    """

    _kinds: ClassVar[dict[str, type]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._kinds = {name: kind for name, kind, *_ in cls._fields_ if name != "pad"}

    def __init__(self, **values: object) -> None:
        if values.keys() != self._kinds.keys():
            odd = ", ".join(sorted(values.keys() ^ self._kinds.keys()))
            raise TypeError(f"{type(self).__name__} is built with each of its fields by name; wrong: {odd}")
        self._held: list[object] = []
        for name, value in values.items():
            if isinstance(value, (Tensor, Partition)):
                values[name] = self._pointing_to(value, self._kinds[name])
            elif isinstance(value, torch.dtype):
                values[name] = DTYPES[value]
        super().__init__(**values)

    def _pointing_to(self, value: Tensor | Partition, kind: type) -> object:
        if isinstance(value, Partition):
            order, offsets = value.order.contiguous(), value.offsets.contiguous()
            self._held += order, offsets
            return Groups.of(order, offsets)
        value = row_major(value) if kind is View else value.contiguous()
        self._held.append(value)
        return View.of(value) if kind is View else value.data_ptr()

    @classmethod
    def _of_numbers(cls, *numbers: int) -> Any:
        """A struct of numbers alone, in the order of its fields: many are built for every call."""
        found = cls.__new__(cls)
        ctypes.Structure.__init__(found, *numbers)
        return found


class View(Args):
    _fields_ = (("data", c_void_p), *_fields(c_int64, "batch head row"))

    @classmethod
    def of(cls, x: Tensor, unit: int = 1) -> View:
        """A [B, H, N, D] tensor whose last dimension is contiguous; strides in elements times `unit`."""
        batch, head, row, _ = x.stride()
        return cls._of_numbers(x.data_ptr(), batch * unit, head * unit, row * unit)


class Groups(Args):
    _fields_ = (*_fields(c_void_p, "order offsets"), *_fields(c_int64, "tokens groups"))

    @classmethod
    def of(cls, order: Tensor, offsets: Tensor) -> Groups:
        """Of a partition; RouteError if they are not int64."""
        if order.dtype != torch.long or offsets.dtype != torch.long:
            raise RouteError(f"partition in {order.dtype} / {offsets.dtype}: wanted int64")
        return cls._of_numbers(order.data_ptr(), offsets.data_ptr(), order.shape[-1], offsets.shape[-1] - 1)


class Shape(Args):
    _fields_ = _fields(c_int64, "batch heads kv_heads queries keys dim value_dim")

    @classmethod
    def of(cls, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, queries: int | None = None) -> Shape:
        """The sizes of a call with these tensors; one that is left out is like the one before it."""
        k = q if k is None else k
        batch, heads, rows, dim = q.shape
        value_dim = (k if v is None else v).shape[3]
        queries = rows if queries is None else queries
        return cls._of_numbers(batch, heads, k.shape[1], queries, k.shape[2], dim, value_dim)


class AttendArgs(Args):
    _fields_ = (
        ("shape", Shape),
        *_fields(Groups, "query kv"),
        *_fields(View, "q k v out"),
        *_fields(c_void_p, "lse cells summary_keys summary_values summary_weight basis origin curve slope"),
        *_fields(c_int64, "summary_count rank"),
        *_fields(c_float, "scale max_bend"),
        *_fields(c_int32, "dtype out_dtype"),
    )


class RowsArgs(Args):
    _fields_ = (
        ("shape", Shape),
        *_fields(View, "q k v out"),
        *_fields(c_void_p, "key_mask partial"),
        *_fields(c_int64, "block_rows chunks"),
        *_fields(c_void_p, "kept labels order"),
        ("groups", c_int64),
        *_fields(c_void_p, "part part_lse"),
        ("scale", c_float),
        *_fields(c_int32, "dtype pad"),
    )


class MassArgs(Args):
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


class SlotsArgs(Args):
    _fields_ = (
        ("shape", Shape),
        ("kv", Groups),
        ("anchors", c_void_p),
        *_fields(View, "k v"),
        *_fields(c_void_p, "slots log_mass near keys values weight"),
        ("count", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
    )


class CovarianceArgs(Args):
    _fields_ = (
        ("shape", Shape),
        ("kv", Groups),
        *_fields(View, "k v"),
        *_fields(c_void_p, "factor centroids share pool slope curve"),
        *_fields(c_int64, "rank pools"),
        *_fields(c_int32, "dtype pad"),
    )


class KmeansArgs(Args):
    _fields_ = (
        *_fields(c_int64, "heads tokens rank groups steps"),
        *_fields(c_void_p, "x centres valid labels means sizes"),
    )


class MeansArgs(Args):
    _fields_ = (("shape", Shape), ("groups", Groups), ("x", View), ("means", c_void_p), *_fields(c_int32, "dtype pad"))


class GatherArgs(Args):
    _fields_ = (*_fields(c_int64, "batch heads tokens rows row_bytes"), ("x", View), *_fields(c_void_p, "order out"))


class ProjectArgs(Args):
    _fields_ = (
        ("shape", Shape),
        ("x", View),
        *_fields(c_void_p, "factor out"),
        ("rank", c_int64),
        ("min_rms", c_float),
        *_fields(c_int32, "normalise dtype pad"),
    )


class AffineArgs(Args):
    _fields_ = (
        ("shape", Shape),
        *_fields(View, "x out"),
        *_fields(c_void_p, "left right bias"),
        ("rank", c_int64),
        *_fields(c_int32, "out_dtype pad"),
    )


class EigenArgs(Args):
    _fields_ = (*_fields(c_int64, "count size"), *_fields(c_void_p, "matrix values vectors"))


class FitArgs(Args):
    _fields_ = (
        *_fields(c_int64, "heads rows dim rank subspace"),
        *_fields(c_double, "ridge feature_eps max_leverage min_energy"),
        *_fields(c_void_p, "x residual weights left right bias left_out"),
    )


class FiniteArgs(Args):
    _fields_ = (("count", c_int64), *_fields(c_void_p, "x finite"))


class SortArgs(Args):
    _fields_ = (*_fields(c_int64, "heads tokens groups"), *_fields(c_void_p, "labels order offsets"))


class MomentArgs(Args):
    _fields_ = (("shape", Shape), ("x", View), *_fields(c_void_p, "counted moment"), *_fields(c_int32, "centred dtype"))


class CentralArgs(Args):
    _fields_ = (*_fields(c_int64, "heads tokens rank groups count"), *_fields(c_void_p, "x labels rows"))


class SpendArgs(Args):
    _fields_ = (
        *_fields(c_int64, "heads query_groups kv_groups passes budgets"),
        *_fields(c_void_p, "log_share log_sizes query_sizes kv_sizes budget cells"),
    )


class MatmulArgs(Args):
    _fields_ = (*_fields(c_int64, "matrices rows inner columns transposed"), *_fields(c_void_p, "x y out"))


class DirectionsArgs(Args):
    _fields_ = (
        *_fields(c_int64, "heads dim rank steps"),
        *_fields(c_double, "scale min_variance tiny shift"),
        *_fields(c_void_p, "spread covariance to_query to_key"),
    )


class PeaksArgs(Args):
    _fields_ = (("shape", Shape), ("x", View), *_fields(c_void_p, "peaks finite"), *_fields(c_int32, "dtype pad"))


class ChooseArgs(Args):
    _fields_ = (
        *_fields(c_int64, "heads heads_per_kv query_groups kv_groups single merged"),
        *_fields(c_void_p, "log_mass cells query_offsets kv_offsets near wanted slots slot_mass share"),
    )


def structs() -> dict[str, int]:
    """Names and sizes of the structs above, which must be those of the library."""
    return {kind.__name__: ctypes.sizeof(kind) for kind in Args.__subclasses__()}

"""The CPU backend in C++: fused kernels for AVX-512, AVX2 and any other processor, chosen when it loads.

The sources are in `src/`; the library is built with the package and loaded through a plain C interface.
Work is cut into tasks whose results never depend on the number of threads: they are bit-identical on repeats
and across thread counts. Memory beyond the outputs is a few hundred KiB per thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from ctypes import addressof, c_int32
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import BackendError, RouteError
from ...subspace import SHIFT, STEPS
from ...types import MAX_BEND, Partition, ResidualFit, Route, SummaryKeys
from ..backend import BACKENDS, Backend
from ..plain.directions import VARIANCE_FLOOR
from ..plain.grouping import RMS_FLOOR
from ..plain.residual_fit import FEATURE_EPS, MAX_LEVERAGE, MIN_ENERGY
from ..plain.routing import FILL_PASSES
from . import abi
from .threads import torch_on_one_thread

ROW_BLOCK = 240  # rows of `attend_rows` that share one pass over a chunk of keys
ROW_CHUNK = 2048  # keys of such a chunk, at least
ROW_PARTS = 32  # row blocks x chunks that keep many cores busy
MASS_KEYS = 2048  # keys of a task of `cell_mass`, about


def isa() -> str | None:
    """The instruction set in use, or None where the library is missing."""
    lib = abi.library()
    return None if lib.missing else abi.choose_isa(lib)


def _rows(x: Tensor) -> Tensor:
    """The kernels read any strides but one: elements of a row are neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _floats(*shape: int) -> Tensor:
    """Room for fp32 results, whatever torch's default dtype is: the library writes four bytes per number."""
    return torch.empty(shape, dtype=torch.float32)


def _float(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _contiguous(partition: Partition) -> Partition:
    """Its result must live in a variable for as long as the library reads it."""
    order, offsets = partition.order.contiguous(), partition.offsets.contiguous()
    if order.dtype != torch.long or offsets.dtype != torch.long:
        raise RouteError(f"partition in {order.dtype} / {offsets.dtype}: wanted int64")
    return Partition(partition.labels, order, offsets)


def _groups(partition: Partition) -> abi.Groups:
    order, offsets = partition.order, partition.offsets
    return abi.Groups(
        order=order.data_ptr(), offsets=offsets.data_ptr(), tokens=order.shape[-1], groups=partition.groups
    )


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@BACKENDS.register
class NativeBackend(Backend):
    name: ClassVar[str] = "native"
    about: ClassVar[str] = "fused C++ kernels for the CPU"
    priority: ClassVar[int] = 100
    deterministic: ClassVar[bool] = True
    adds_by_slot: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...] | None] = ("cpu",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, int]] = (8, 256)

    def __init__(self, isa: str | None = None) -> None:
        self._isa = isa

    def unavailable(self) -> str | None:
        lib = abi.library()
        if lib.missing:
            return lib.missing
        try:
            self._isa_number()
        except BackendError as error:
            return str(error)
        return None

    def _isa_number(self) -> int:
        return abi.ISAS.index(abi.choose_isa(abi.library(), self._isa))

    def session(self) -> AbstractContextManager[None]:
        return torch_on_one_thread()

    def _run(self, name: str, args: abi.Args) -> None:
        abi.library().run(name, args, self._isa_number())

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        scale: float,
        summary: SummaryKeys | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _rows(q), _rows(k), _rows(v)
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype or q.dtype)
        lse = _floats(*q.shape[:-1])
        query, kv, cells = _contiguous(route.query), _contiguous(route.kv), _bytes(route.cells)
        keys = values = weight = basis = origin = curve = slope = None
        if summary is not None and summary.log_weight.shape[-1]:
            keys, values, weight = _float(summary.keys), _float(summary.values), _float(summary.log_weight)
            if summary.drift is not None:
                drift = summary.drift
                basis, origin = _float(drift.basis), _float(drift.origin)
                curve, slope = _float(drift.curve), _float(drift.slope)
        args = abi.AttendArgs(
            shape=_shape(q, k, v), query=_groups(query), kv=_groups(kv),
            q=abi.View.of(q), k=abi.View.of(k), v=abi.View.of(v), out=abi.View.of(out),
            lse=lse.data_ptr(), cells=_pointer(cells),
            summary_keys=_pointer(keys), summary_values=_pointer(values), summary_weight=_pointer(weight),
            basis=_pointer(basis), origin=_pointer(origin), curve=_pointer(curve), slope=_pointer(slope),
            summary_count=0 if weight is None else weight.shape[-1],
            rank=0 if basis is None else basis.shape[-1],
            scale=scale, max_bend=MAX_BEND, dtype=abi.DTYPES[q.dtype], out_dtype=abi.DTYPES[out.dtype],
        )  # fmt: skip
        self._run("attend", args)
        return out, lse

    def attend_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float
    ) -> Tensor:
        return self._exact_rows(rows, k, v, None, None, key_mask, scale)[0]

    def split_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self._exact_rows(rows, k, v, kv, kept, key_mask, scale)

    def _exact_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, kv: Partition | None, kept: Tensor | None,
        key_mask: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if rows.dtype != k.dtype:
            rows, k, v = rows.float(), k.float(), v.float()
        rows, k, v, mask, kept = _rows(rows), _rows(k), _rows(v), _bytes(key_mask), _bytes(kept)
        labels = None if kv is None else kv.labels.contiguous()
        order = None if kv is None else kv.order.contiguous()
        batch, heads, count, _ = rows.shape
        out = _floats(batch, heads, count, v.shape[-1])
        part = out if kept is None else torch.empty_like(out)
        lse = _floats(batch, heads, count)
        block = max(1, min(count, ROW_BLOCK))
        blocks = -(-count // block)
        chunks = max(1, min(-(-k.shape[2] // ROW_CHUNK), ROW_PARTS // max(1, blocks)))
        width = -(-v.shape[-1] // 16) * 16
        states = 1 if kept is None else 2
        partial = _floats(batch * heads * blocks * chunks, states * block * (width + 2))
        args = abi.RowsArgs(
            shape=_shape(rows, k, v), q=abi.View.of(rows), k=abi.View.of(k), v=abi.View.of(v),
            out=abi.View.of(out), key_mask=_pointer(mask), partial=partial.data_ptr(), block_rows=block,
            chunks=chunks, kept=_pointer(kept), labels=_pointer(labels), order=_pointer(order),
            groups=0 if kept is None else kept.shape[-1], part=part.data_ptr(), part_lse=lse.data_ptr(),
            scale=scale, dtype=abi.DTYPES[rows.dtype],
        )  # fmt: skip
        self._run("attend_rows", args)
        return out, part, lse

    def cell_mass(self, anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
        anchors, k = _float(anchors), _rows(k)
        batch, heads, count, _ = anchors.shape
        kv_heads, keys = k.shape[1:3]
        mass = _floats(batch, heads, count, kv.groups)
        kv = _contiguous(kv)
        # Anchors of the query heads that share a K/V head are one block: its keys are packed once for all.
        shape = _shape(anchors, k, k)
        shape.queries = heads // kv_heads * count
        task_groups = max(1, MASS_KEYS * kv.groups // max(1, keys))
        args = abi.MassArgs(
            shape=shape, kv=_groups(kv), anchors=anchors.data_ptr(), k=abi.View.of(k), mass=mass.data_ptr(),
            task_groups=task_groups, scale=scale, dtype=abi.DTYPES[k.dtype],
        )  # fmt: skip
        self._run("cell_mass", args)
        return mass

    def slot_means(
        self, anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor,
        scale: float, near: Tensor | None = None, single: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self._slots(anchors, k, v, kv, slots, log_mass, scale, near, None)

    def slot_summary(
        self, anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor,
        scale: float, near: Tensor, single: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        weight = _floats(*log_mass.shape)
        return *self._slots(anchors, k, v, kv, slots, log_mass, scale, near, weight), weight

    def _slots(
        self, anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor,
        scale: float, near: Tensor | None, weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        anchors, k, v, log_mass = _float(anchors), _rows(k), _rows(v), _float(log_mass)
        kv, slots = _contiguous(kv), slots.int().contiguous()
        near = None if near is None else near.contiguous()
        *heads, dim = *log_mass.shape, anchors.shape[-1]
        keys, values = _floats(*heads, dim), _floats(*heads, v.shape[-1])
        # Anchors of the query heads that share a K/V head are one block, as in `cell_mass`.
        shape = _shape(anchors, k, v)
        shape.queries = anchors.shape[1] // k.shape[1] * anchors.shape[2]
        args = abi.SlotsArgs(
            shape=shape, kv=_groups(kv), anchors=anchors.data_ptr(), k=abi.View.of(k), v=abi.View.of(v),
            slots=slots.data_ptr(), log_mass=log_mass.data_ptr(), near=_pointer(near), keys=keys.data_ptr(),
            values=values.data_ptr(), weight=_pointer(weight), count=log_mass.shape[-1], scale=scale,
            dtype=abi.DTYPES[k.dtype],
        )  # fmt: skip
        self._run("slot_means", args)
        return keys, values

    def choose_slots(
        self, log_mass: Tensor, cells: Tensor, query: Partition, kv: Partition, near: Tensor, single: int,
        merged: int, wanted: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        mass, kept, wanted_heads = _float(log_mass), _bytes(cells), _bytes(wanted)
        near, query_offsets, kv_offsets = (t.contiguous() for t in (near, query.offsets, kv.offsets))
        batch, heads, query_groups, kv_groups = mass.shape
        slots, share = torch.empty(mass.shape, dtype=torch.int32), torch.empty_like(mass)
        slot_mass = _floats(batch, heads, query_groups, single + merged)
        args = abi.ChooseArgs(
            heads=batch * heads, shares=heads // kv_offsets.shape[1], query_groups=query_groups,
            kv_groups=kv_groups, single=single, merged=merged, log_mass=mass.data_ptr(),
            cells=_pointer(kept), query_offsets=query_offsets.data_ptr(), kv_offsets=kv_offsets.data_ptr(),
            near=near.data_ptr(), wanted=_pointer(wanted_heads), slots=slots.data_ptr(),
            slot_mass=slot_mass.data_ptr(), share=share.data_ptr(),
        )  # fmt: skip
        self._run("choose_slots", args)
        return slots, slot_mass, share

    def mixed_covariance(
        self, share: Tensor, k: Tensor, factor: Tensor, v: Tensor, kv: Partition, centroids: Tensor,
        pool: Tensor | None = None, pools: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        k, v, kv = _rows(k), _rows(v), _contiguous(kv)
        share, factor, centroids = _float(share), _float(factor), _float(centroids)
        if pool is None:
            pool, pools = torch.arange(kv.groups).expand(*k.shape[:2], -1), kv.groups
        pool = pool.contiguous()
        batch, heads, count, _ = share.shape
        rank = factor.shape[-1]
        slope, curve = _floats(batch, heads, count, rank, v.shape[-1]), _floats(batch, heads, count, rank)
        shape = _shape(k, k, v)
        shape.queries = count
        args = abi.CovarianceArgs(
            shape=shape, kv=_groups(kv), k=abi.View.of(k), v=abi.View.of(v), factor=factor.data_ptr(),
            centroids=centroids.data_ptr(), share=share.data_ptr(), pool=pool.data_ptr(),
            slope=slope.data_ptr(), curve=curve.data_ptr(), rank=rank, pools=pools,
            dtype=abi.DTYPES[k.dtype],
        )  # fmt: skip
        self._run("mixed_covariance", args)
        return slope, curve

    def kmeans_step(self, x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self._kmeans(x, centres, 1, valid)

    def lloyd(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._kmeans(self.only_finite(x), self.only_finite(centres), steps, valid)

    def _kmeans(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, centres, mask = _float(x), _float(centres), _bytes(valid)
        heads, tokens, rank = x.shape
        groups = centres.shape[1]
        labels = torch.empty(heads, tokens, dtype=torch.long)
        means = torch.empty_like(centres)
        sizes = torch.empty(heads, groups, dtype=torch.long)
        args = abi.KmeansArgs(
            heads=heads, tokens=tokens, rank=rank, groups=groups, steps=steps, x=x.data_ptr(),
            centres=centres.data_ptr(), valid=_pointer(mask), labels=labels.data_ptr(),
            means=means.data_ptr(), sizes=sizes.data_ptr(),
        )  # fmt: skip
        self._run("kmeans", args)
        return labels, means, sizes

    def group_means(self, x: Tensor, partition: Partition) -> Tensor:
        x = _rows(x)
        means = _floats(*x.shape[:2], partition.groups, x.shape[-1])
        partition = _contiguous(partition)
        args = abi.MeansArgs(
            shape=_shape(x, x, x), groups=_groups(partition), x=abi.View.of(x), means=means.data_ptr(),
            dtype=abi.DTYPES[x.dtype],
        )  # fmt: skip
        self._run("group_means", args)
        return means

    def gather_rows(self, x: Tensor, order: Tensor) -> Tensor:
        x, order = _rows(x), order.contiguous()
        batch, heads, tokens, dim = x.shape
        out = torch.empty(batch, heads, order.shape[-1], dim, dtype=x.dtype)
        args = abi.GatherArgs(
            batch=batch, heads=heads, tokens=tokens, rows=order.shape[-1], row_bytes=dim * x.element_size(),
            x=abi.View.of(x, x.element_size()), order=order.data_ptr(), out=out.data_ptr(),
        )  # fmt: skip
        self._run("gather_rows", args)
        return out

    def project(self, x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
        x, factor = _rows(x), _float(factor)
        out = _floats(*x.shape[:3], factor.shape[-1])
        args = abi.ProjectArgs(
            shape=_shape(x, x, x), x=abi.View.of(x), factor=factor.data_ptr(), out=out.data_ptr(),
            rank=factor.shape[-1], rms_floor=RMS_FLOOR, normalise=int(normalise), dtype=abi.DTYPES[x.dtype],
        )  # fmt: skip
        self._run("project", args)
        return out

    def add_affine(
        self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        out = _rows(out.float())
        left, right, bias = _float(left), _float(right), _float(bias)
        result = out if dtype == torch.float32 else torch.empty(out.shape, dtype=dtype)
        args = abi.AffineArgs(
            shape=_shape(out, out, out), x=abi.View.of(out), out=abi.View.of(result), left=left.data_ptr(),
            right=right.data_ptr(), bias=bias.data_ptr(), rank=left.shape[-1], out_dtype=abi.DTYPES[dtype],
        )  # fmt: skip
        self._run("add_affine", args)
        return result

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        matrix = matrix.double().contiguous()
        vectors, values = torch.empty_like(matrix), torch.empty_like(matrix[..., 0])
        size = matrix.shape[-1]
        args = abi.EigenArgs(
            count=values.numel() // max(1, size), size=size, matrix=matrix.data_ptr(),
            values=values.data_ptr(), vectors=vectors.data_ptr(),
        )  # fmt: skip
        self._run("eigh", args)
        return values, vectors.mT

    def fit_residual(
        self, x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
    ) -> ResidualFit:
        x, residual, weights = _float(x), _float(residual), _float(weights)
        *heads, count, dim = x.shape
        rank = min(rank, count, dim) if subspace else dim
        left, right = _floats(*heads, dim, rank), _floats(*heads, rank, dim)
        bias, left_out = _floats(*heads, dim), torch.empty_like(x)
        args = abi.FitArgs(
            heads=math.prod(heads), rows=count, dim=dim, rank=rank, subspace=int(subspace), ridge=ridge,
            feature_eps=FEATURE_EPS, max_leverage=MAX_LEVERAGE, min_energy=MIN_ENERGY,
            x=x.data_ptr(), residual=residual.data_ptr(),
            weights=weights.data_ptr(), left=left.data_ptr(), right=right.data_ptr(), bias=bias.data_ptr(),
            left_out=left_out.data_ptr(),
        )  # fmt: skip
        self._run("fit_residual", args)
        return ResidualFit(left, right, bias, left_out)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        turned = y.stride(-1) != 1 and y.stride(-2) == 1  # a transposed view needs no copy
        x, right = _float(x), _float(y.mT if turned else y)
        out = _floats(*x.shape[:-1], y.shape[-1])
        args = abi.MatmulArgs(
            matrices=math.prod(x.shape[:-2]), rows=x.shape[-2], inner=x.shape[-1], columns=y.shape[-1],
            transposed=int(turned), x=x.data_ptr(), y=right.data_ptr(), out=out.data_ptr(),
        )  # fmt: skip
        self._run("matmul", args)
        return out

    def shared_directions(
        self, spread: Tensor, covariance: Tensor, rank: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        spread, covariance = spread.double().contiguous(), covariance.double().contiguous()
        *heads, dim, _ = covariance.shape
        to_query, to_key = _floats(*heads, dim, rank), _floats(*heads, dim, rank)
        args = abi.DirectionsArgs(
            heads=math.prod(heads), dim=dim, rank=rank, steps=STEPS, scale=scale, floor=VARIANCE_FLOOR,
            tiny=torch.finfo(torch.float32).tiny, shift=SHIFT, spread=spread.data_ptr(),
            covariance=covariance.data_ptr(), to_query=to_query.data_ptr(), to_key=to_key.data_ptr(),
        )  # fmt: skip
        self._run("directions", args)
        return to_query, to_key

    def row_peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = _rows(x)
        peaks, finite = _floats(*x.shape[:3]), torch.empty(x.shape[:3], dtype=torch.bool)
        args = abi.PeaksArgs(
            shape=_shape(x, x, x), x=abi.View.of(x), peaks=peaks.data_ptr(), finite=finite.data_ptr(),
            dtype=abi.DTYPES[x.dtype],
        )  # fmt: skip
        self._run("row_peaks", args)
        return peaks, finite

    def only_finite(self, x: Tensor) -> Tensor:
        x, finite = _float(x), c_int32()
        self._run("all_finite", abi.FiniteArgs(count=x.numel(), x=x.data_ptr(), finite=addressof(finite)))
        return x if finite.value else super().only_finite(x)

    def sort_groups(self, labels: Tensor, groups: int) -> Partition:
        labels = labels.contiguous()
        *heads, tokens = labels.shape
        order, offsets = torch.empty_like(labels), labels.new_empty(*heads, groups + 1)
        args = abi.SortArgs(
            heads=math.prod(heads), tokens=tokens, groups=groups, labels=labels.data_ptr(),
            order=order.data_ptr(), offsets=offsets.data_ptr(),
        )  # fmt: skip
        self._run("sort_groups", args)
        return Partition(labels, order, offsets)

    def second_moment(self, x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
        x, mask = _rows(x), _bytes(counted)
        batch, heads, _, dim = x.shape
        moment = torch.empty(batch, heads, dim, dim, dtype=torch.double)
        args = abi.MomentArgs(
            shape=_shape(x, x, x), x=abi.View.of(x), counted=_pointer(mask), moment=moment.data_ptr(),
            centred=int(centred), dtype=abi.DTYPES[x.dtype],
        )  # fmt: skip
        self._run("second_moment", args)
        return moment

    def central_rows(self, x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
        x, labels = _float(x), labels.contiguous()
        *heads, tokens = labels.shape
        rows = labels.new_empty(*heads, count)
        args = abi.CentralArgs(
            heads=math.prod(heads), tokens=tokens, rank=x.shape[-1], groups=groups, count=count,
            x=x.data_ptr(), labels=labels.data_ptr(), rows=rows.data_ptr(),
        )  # fmt: skip
        self._run("central_rows", args)
        return rows

    def spend(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
        return self.spend_each(log_share, query_sizes, kv_sizes, [budget])[0]

    def spend_each(
        self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor]
    ) -> Tensor:
        *heads, query_groups, kv_groups = log_share.shape
        share, log_sizes = _float(log_share), kv_sizes.clamp(min=1).float().log()
        queries, keys = query_sizes.contiguous(), kv_sizes.contiguous()
        budget = torch.stack([own.expand(heads) for own in budgets])
        cells = torch.empty(len(budgets), *share.shape, dtype=torch.bool)
        args = abi.SpendArgs(
            heads=math.prod(heads), query_groups=query_groups, kv_groups=kv_groups, passes=FILL_PASSES,
            budgets=len(budgets), log_share=share.data_ptr(), log_sizes=log_sizes.data_ptr(),
            query_sizes=queries.data_ptr(), kv_sizes=keys.data_ptr(), budget=budget.data_ptr(),
            cells=cells.data_ptr(),
        )  # fmt: skip
        self._run("spend", args)
        return cells


def _shape(q: Tensor, k: Tensor, v: Tensor) -> abi.Shape:
    batch, heads, queries, dim = q.shape
    return abi.Shape(
        batch=batch, heads=heads, kv_heads=k.shape[1], queries=queries, keys=k.shape[2], dim=dim,
        value_dim=v.shape[3],
    )  # fmt: skip

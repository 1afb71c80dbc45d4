"""The backend that keeps a whole call on the GPU: every primitive a Triton kernel, nothing read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import ClassVar

import torch
from torch import Tensor

from ...types import Partition, Route, SummaryKeys
from ..backend import BACKENDS, Backend, Demand
from ..self_test import first_use
from .entry import entry, interpreting, launched, missing_triton
from .session import Session

MIN_CAPABILITY = (8, 0)


@BACKENDS.register
class TritonBackend(Backend):
    name: ClassVar[str] = "triton"
    about: ClassVar[str] = "Triton kernels for NVIDIA GPUs from sm_80, the whole call on the device"
    # the interpreter must be asked for by name: `auto` would make a call thousands of times slower
    preference: ClassVar[int] = -1 if interpreting() else 40
    deterministic: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...] | None] = ("cuda", "cpu") if interpreting() else ("cuda",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, int]] = (1, 256)
    _session = Session(keeps=False)

    def unavailable(self) -> str | None:
        return missing_triton()

    def reasons(self, demand: Demand) -> list[str]:
        found = super().reasons(demand)
        if found:
            return found
        if demand.device.type == "cuda":
            if torch.version.hip is not None:
                return ["an AMD GPU: the kernels are written and checked for NVIDIA alone"]
            major, minor = torch.cuda.get_device_capability(demand.device)
            if (major, minor) < MIN_CAPABILITY:
                return [f"sm_{major}{minor}: takes sm_80 and newer"]
            failed = first_use(self, demand.device)
            return [failed] if failed else []
        return []

    # The kernels are imported when they are first used, so that `import residua` needs no Triton.

    @contextmanager
    def session(self) -> Iterator[Backend]:
        """Inside, rows that are wanted in the same order again are gathered once."""
        bound = copy(self)
        bound._session = Session(keeps=True)
        try:
            yield bound
        finally:
            bound._session = type(self)._session

    def release(self) -> None:
        self._session.release("rows")

    def group_major(self, x: Tensor, kv: Partition, values: bool = False) -> Tensor:
        """Rows of x [B, Hkv, N, D] in the order of their groups, zeros behind column D up to the width of a
        tile. Of values it is noted on the way which channels are not finite."""
        from .permute import gather_noting, gather_rows
        from .shapes import padded

        found: Tensor | None = self._session.find("rows", x, kv.order)
        if found is not None:
            return found
        if self._session.keeps and values and kv.groups:
            found, lost = gather_noting(x, kv.order, kv.offsets, padded(x.shape[-1]))
            self._session.keep("lost", lost, x)
        else:
            found = gather_rows(x, kv.order, padded(x.shape[-1]))
        self._session.keep("rows", found, x, kv.order)
        return found

    gather_rows = launched("gather_rows", "permute")
    attend_rows = launched("attend_rows", "rows")
    split_rows = launched("split_rows", "rows")
    candidate_errors = launched("candidate_errors", "judging")
    best_candidate = launched("best_candidate", "judging")
    add_affine = launched("add_affine", "projection")
    spoil = launched("spoil", "nonfinite")
    project = launched("project", "projection")
    choose_slots = launched("choose_slots", "choose_slots")
    best_cells = launched("best_cells", "spend")
    missed_mass = launched("missed_mass", "spend")
    group_priority = launched("group_priority", "priority")
    second_moment = launched("second_moment", "moment")
    switch_summary = launched("switch_summary", "judging")

    @entry
    def group_means(self, x: Tensor, partition: Partition, keep: bool = False) -> Tensor:
        from .segments import segment_means
        from .shapes import padded

        rows: Tensor | None = None
        if keep and self._session.keeps:
            rows = torch.empty(*x.shape[:3], padded(x.shape[-1]), dtype=x.dtype, device=x.device)
            self._session.keep("rows", rows, x, partition.order)
        return segment_means(x, partition.order, partition.offsets, keep=rows)

    @entry
    def cell_mass(self, anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
        from .mass import cell_mass

        return cell_mass(anchors, self.group_major(k, kv), kv.offsets, scale)

    @entry
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
        from .attend import attend

        keys, values = self.group_major(k, route.kv), self.group_major(v, route.kv, values=True)
        return attend(q, keys, values, route, scale, summary, out_dtype, v.shape[-1])

    @entry
    def slot_summary(
        self,
        anchors: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Partition,
        slots: Tensor,
        log_mass: Tensor,
        scale: float,
        near: Tensor | None = None,
        single: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from .slots import slot_means

        if near is None:
            return super().slot_summary(anchors, k, v, kv, slots, log_mass, scale)
        keys, values = self.group_major(k, kv), self.group_major(v, kv, values=True)
        members, ends = self._neighbourhoods(near, log_mass.shape[-1] - single)
        return slot_means(anchors, keys, values, kv.offsets, members, ends, slots, log_mass, scale, v.shape[-1], single)

    @entry
    def lloyd(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None, means: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        from .kmeans import assign, kmeans_step
        from .small_kmeans import fits, small_kmeans

        if fits(x, centres, valid):
            return small_kmeans(x.float(), centres.float(), steps)
        for _ in range(steps if means else steps - 1):
            labels, centres, sizes = kmeans_step(x, centres, valid)
        if means:
            return labels, centres, sizes
        return assign(x, centres, valid), centres, torch.empty(0, dtype=torch.long)

    @entry
    def sort_groups(self, labels: Tensor, groups: int) -> Partition:
        from .sort import sort_labels

        order, offsets = sort_labels(labels.flatten(0, 1), groups)
        shape = labels.shape[:2]
        return Partition(labels, order.unflatten(0, shape), offsets.unflatten(0, shape))

    @entry
    def lost_channels(self, v: Tensor, mask: Tensor | None) -> Tensor:
        from .nonfinite import lost_channels

        noted: Tensor | None = self._session.find("lost", v)
        return noted > 0 if noted is not None else lost_channels(v, mask)

    @entry
    def _leading_basis(self, matrix: Tensor, rank: int) -> Tensor:
        from .subspace import fits, leading_space

        if not fits(matrix, rank):
            return super()._leading_basis(matrix, rank)
        return leading_space(matrix, rank, factor=False).to(matrix.dtype)

    @entry
    def leading_factor(self, moment: Tensor, rank: int, exact: bool) -> Tensor:
        from .subspace import fits, leading_space

        if exact or not fits(moment, rank):
            return super().leading_factor(moment, rank, exact)
        return leading_space(moment, rank, factor=True)

    @entry
    def skipped_covariance(
        self,
        share: Tensor,
        k: Tensor,
        factor: Tensor,
        v: Tensor,
        kv: Partition,
        centroids: Tensor,
        merged: Tensor | None = None,
        near: Tensor | None = None,
        free: int | None = None,
        pooled: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Inside the groups and among them by one product: the covariances of the neighbourhoods stand behind
        those of the groups."""
        from .covariance import among_covariance

        if merged is None or near is None:
            covariance, variance = self._key_covariance(k, factor, v, kv, centroids)
            # of 16 bits where the keys have no more: shares and covariances only weigh a correction
            share = share.to(covariance.dtype)
            return (share @ covariance.flatten(3)).unflatten(-1, covariance.shape[3:]), share @ variance
        pools = merged.shape[-1]
        if pooled:
            share = self._pooled_share(share, kv, near, pools)
        if self._leaves_no_registers(k, v):
            means = self.group_means(v, kv)
            covariance, variance = self._key_covariance(k, factor, v, kv, centroids, pools)
        else:
            means = torch.empty(*centroids.shape[:3], v.shape[-1], dtype=torch.float32, device=v.device)
            covariance, variance = self._key_covariance(k, factor, v, kv, centroids, pools, means)
        x = self.matmul(centroids, factor)
        free = kv.groups if free is None else free
        among_covariance(x, means, *self._neighbourhoods(near, pools), kv, free, (covariance, variance))
        weights = torch.empty(*share.shape[:3], kv.groups + pools, dtype=covariance.dtype, device=share.device)
        weights[..., : kv.groups] = share
        weights[..., kv.groups :] = merged
        return (weights @ covariance.flatten(3)).unflatten(-1, covariance.shape[3:]), weights @ variance

    def _key_covariance(
        self,
        k: Tensor,
        factor: Tensor,
        v: Tensor,
        kv: Partition,
        centroids: Tensor,
        more: int = 0,
        means: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        from .covariance import key_covariance
        from .shapes import padded

        keep: tuple[Tensor, Tensor] | None = None
        values, keys = v, self.group_major(k, kv)
        known = self._session.find("rows", v, kv.order) is not None
        if known or not self._session.keeps or self._leaves_no_registers(k, v):
            values = self.group_major(v, kv, values=True)
        else:  # they are read in group order here for the first time
            rows = torch.empty(*v.shape[:3], padded(v.shape[-1]), dtype=v.dtype, device=v.device)
            keep = (rows, torch.zeros(*v.shape[:2], v.shape[-1], dtype=torch.int32, device=v.device))
            self._session.keep("rows", rows, v, kv.order)
            self._session.keep("lost", keep[1], v)
        return key_covariance(keys, values, kv, factor, centroids, v.shape[-1], keep, more, means)

    @staticmethod
    def _leaves_no_registers(k: Tensor, v: Tensor) -> bool:
        """Whether keys and values have so many columns of fp32 that the covariance kernel can neither sort
        the values on the way nor find their means."""
        from .shapes import padded

        return v.dtype == torch.float32 and padded(max(k.shape[-1], v.shape[-1])) > 128

    def _neighbourhoods(self, near: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """K/V groups in the order of their neighbourhoods [B, Hkv, Ck], and where each begins."""
        from .sort import sort_labels

        found: tuple[Tensor, Tensor] | None = self._session.find("sorted", near)
        if found is None:
            order, ends = sort_labels(near.flatten(0, 1), max(1, count))
            found = order.unflatten(0, near.shape[:2]), ends.unflatten(0, near.shape[:2])
            self._session.keep("sorted", found, near)
        return found

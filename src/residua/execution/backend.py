"""What a backend is, and how one registers itself; `selection.py` chooses one.

A backend runs the heavy primitives of a call. The base class holds every primitive in plain torch, on any
device, without an [N, N] or an all-heads [N, C] matrix; a backend overrides what it does better.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..registry import Registry
from ..subspace import leading_basis, leading_factor
from ..types import Call, Drift, Partition, ResidualFit, Route, SummaryKeys
from . import plain


@dataclass(frozen=True)
class Demand:
    """What a call asks of a backend; enough to say no before anything is allocated."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int

    @staticmethod
    def of(call: Call) -> Demand:
        return Demand(call.q.device, call.q.dtype, call.q.shape[-1], call.v.shape[-1])


class Backend:
    """Base of the backends. All tensors share one device; outputs are fp32 unless a dtype is asked for.

    Groups and heads are leading dimensions everywhere: x [B, H, N, D] is any strided view with any of the
    backend's dtypes; partitions of keys have Hkv heads and serve H query heads, H a multiple of Hkv.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `residua doctor`
    priority: ClassVar[int] = 0  # `auto` tries higher ones first; below 0: only by name
    deterministic: ClassVar[bool] = True  # bit-identical on repeats
    adds_by_slot: ClassVar[bool] = False  # whether `slot_means` is the fastest way to add a few rows by slot
    devices: ClassVar[tuple[str, ...] | None] = None  # torch device types; None = any
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    head_dims: ClassVar[tuple[int, int]] = (1, 1 << 30)  # inclusive, for D and Dv

    gpu_by_itself: ClassVar[bool] = True  # whether `auto` may choose it for tensors on a GPU

    def unavailable(self) -> str | None:
        """Why this backend cannot run on this machine at all, or None."""
        return None

    def reasons(self, demand: Demand) -> list[str]:
        """Every reason against running this call here; empty means it can."""
        missing = self.unavailable()
        if missing:
            return [missing]
        found = []
        if self.devices is not None and demand.device.type not in self.devices:
            found.append(f"device {demand.device.type}: takes {', '.join(self.devices)}")
        if demand.dtype not in self.dtypes:
            found.append(f"dtype {demand.dtype}: takes {', '.join(map(str, self.dtypes))}")
        low, high = self.head_dims
        for label, dim in (("head_dim", demand.head_dim), ("value head_dim", demand.value_dim)):
            if not low <= dim <= high:
                found.append(f"{label}={dim}: takes {low}..{high}")
        return found

    def session(self) -> AbstractContextManager[None]:
        """Surrounds a whole call."""
        return nullcontext()

    def project(self, x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
        """Response coordinates `x @ factor`, each row divided by its RMS if `normalise`.

        x [B, H, N, D], factor [B, H, D, R] fp32 -> [B, H, N, R] fp32
        """
        return plain.project(x, factor, normalise)

    def coordinates(self, x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
        """`project` for rows that are only grouped by it: a backend may round to 16 bits, and take what is
        not finite as 0.  # [B, H, N, R]"""
        return self.project(x, factor, normalise)

    def kmeans_step(self, x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """One Lloyd step: nearest centre of every row (ties: the lowest index), then the mean of every group.

        x [G, N, R] fp32, centres [G, C, R] fp32, valid [G, N] bool or None
        -> labels [G, N] int64 (-1 where not valid), centres [G, C, R] (an empty group keeps its own),
           sizes [G, C] int64
        """
        return plain.kmeans_step(x, centres, valid)

    def lloyd(
        self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`steps` Lloyd steps, at least one; what is not finite counts as 0. Arguments and results are those
        of `kmeans_step`."""
        x, centres = self.only_finite(x), self.only_finite(centres)
        for _ in range(steps):
            before = centres
            labels, centres, sizes = self.kmeans_step(x, centres, valid)
            # further steps change nothing; a GPU is not asked, because it would have to wait
            if x.device.type == "cpu" and torch.equal(before, centres):
                break
        return labels, centres, sizes

    def lloyd_labels(self, x: Tensor, centres: Tensor, steps: int, valid: Tensor | None) -> Tensor:
        """The labels that `lloyd` ends with.  # [G, N] int64"""
        return self.lloyd(x, centres, steps, valid)[0]

    def gather_rows(self, x: Tensor, order: Tensor) -> Tensor:
        """Rows of x [B, H, N, D] in the order [B, H, M] of token indices -> contiguous [B, H, M, D]."""
        return plain.gather_rows(x, order)

    def group_means(self, x: Tensor, partition: Partition) -> Tensor:
        """Mean of each group's rows, zeros for an empty group.  # [B, H, N, D] -> [B, H, C, D] fp32"""
        return plain.group_means(x, partition)

    def sorted_means(self, x: Tensor, partition: Partition) -> Tensor:
        """`group_means` of rows that will be wanted in the order of their groups: a backend may keep them."""
        return self.group_means(x, partition)

    def cell_mass(self, anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
        """Log of the attention mass of every K/V group at every anchor: logsumexp over the group's keys.

        anchors [B, H, Cq, D] fp32, k [B, Hkv, Nk, D] -> [B, H, Cq, Ck] fp32, -inf for an empty group
        """
        return plain.cell_mass(anchors, k, kv, scale)

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
        """Softmax attention of every row over the kept cells of its query group, and over its summary keys,
        which may drift (see `types.Drift`).

        -> out [B, H, Nq, Dv] in the original row order, in `out_dtype` (None: q's); natural log-sum-exp
        [B, H, Nq] fp32. A row of no group or with nothing kept gets 0 and -inf.
        """
        raise NotImplementedError

    def choose_slots(
        self, log_mass: Tensor, cells: Tensor, query: Partition, kv: Partition, near: Tensor, single: int,
        merged: int, wanted: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gives the `single` heaviest groups that a query group skips a slot each, and all other skipped ones
        the slot `single + near` of their neighbourhood. Repeats give the same bits.

        log_mass and cells [B, H, Cq, Ck], near [B, Hkv, Ck] int64 below `merged`, wanted [B, H] bool: heads
        that skip nothing otherwise -> slots [B, H, Cq, Ck] int32 (-1: none), the log of their masses
        [B, H, Cq, single + merged] fp32 (-inf: empty), each group's share of the skipped mass of its query
        group [B, H, Cq, Ck] fp32
        """
        return plain.choose_slots(log_mass, cells, query, kv, near, single, merged, wanted, self.matmul)

    def slot_means(
        self, anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor,
        scale: float, near: Tensor | None = None, single: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Softmax-weighted mean key and value of the K/V groups that share a slot, at every anchor.

        Key j of a group in slot t weighs exp(scale * anchor . k_j - log_mass[t]) there, where `log_mass` is
        the log-sum-exp over all keys of the slot. Where `near` is given, a slot below `single` holds one
        group of an anchor, and a group b in any other is in slot `single + near[b]`.

        anchors [B, H, Cq, D] fp32, slots [B, H, Cq, Ck] int32 (-1: none), log_mass [B, H, Cq, T] fp32,
        near [B, Hkv, Ck] int64 below T - single
        -> keys [B, H, Cq, T, D], values [B, H, Cq, T, Dv] fp32, 0 in an empty slot
        """
        return plain.slot_means(anchors, k, v, kv, slots, log_mass, scale)

    def slot_summary(
        self, anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor,
        scale: float, near: Tensor, single: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`slot_means`, and the log-weight with which each key has its slot's mass at the anchor. A backend
        may round the keys and values to the dtypes of k and v; the weights belong to what it returns.

        -> keys [B, H, Cq, T, D], values [B, H, Cq, T, Dv], log-weights [B, H, Cq, T] fp32
        """
        keys, values = self.slot_means(anchors, k, v, kv, slots, log_mass, scale, near, single)
        at_anchor = self.matmul(anchors[..., None, :], keys.mT)[..., 0, :]
        return keys, values, log_mass - scale * at_anchor

    def mixed_covariance(
        self, share: Tensor, k: Tensor, factor: Tensor, v: Tensor, kv: Partition, centroids: Tensor,
        pool: Tensor | None = None, pools: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """How the keys' coordinates and the values vary together in a mixture of groups, and how the
        coordinates vary alone: `group_covariance` in the coordinates k @ factor, summed by `share`. Groups
        for which it is not finite count as 0. With `pool`, groups of one pool count alike: each stands for
        the mean over all keys of its pool, still around the means of the keys' own groups.

        share [B, Hkv, M, Ck], k [B, Hkv, N, D], factor [B, Hkv, D, R], v [B, Hkv, N, Dv], centroids
        [B, Hkv, Ck, D] the groups' mean keys, pool [B, Hkv, Ck] int64 in range(pools)
        -> [B, Hkv, M, R, Dv], [B, Hkv, M, R]
        """
        coordinates = self.project(k, factor, normalise=False)
        covariance, variance = map(self.only_finite, self.group_covariance(coordinates, v, kv))
        if pool is not None:
            share = plain.pooled_share(share, kv, pool, pools, self.matmul)
        mixed = self.matmul(share, covariance.flatten(3)).unflatten(-1, covariance.shape[3:])
        return mixed, self.matmul(share, variance)

    def group_covariance(self, x: Tensor, v: Tensor, kv: Partition) -> tuple[Tensor, Tensor]:
        """How coordinates and values vary together inside each group, around the group's means.

        x [B, Hkv, N, R] fp32, v [B, Hkv, N, Dv] -> covariance [B, Hkv, Ck, R, Dv], variance of x
        [B, Hkv, Ck, R], both fp32, 0 for an empty group
        """
        return plain.group_covariance(x, v, kv)

    def attend_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float
    ) -> Tensor:
        """Exact attention of some query rows over all keys that are not padding.

        rows [B, H, M, D], key_mask [B, Nk] bool -> [B, H, M, Dv] fp32
        """
        return plain.attend_rows(rows, k, v, key_mask, scale)

    def split_rows(
        self, rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`attend_rows`, and beside it what the rows would see if they kept only some K/V groups.

        rows [B, H, M, D], kept [B, H, M, Ck] bool -> exact [B, H, M, Dv], over the kept keys alone
        [B, H, M, Dv], their natural log-sum-exp [B, H, M], all fp32; 0 and -inf for a row that keeps nothing
        """
        return plain.split_rows(rows, k, v, kv, kept, key_mask, scale)

    def candidate_errors(
        self, rows: Tensor, group: Tensor, exact: Tensor, kept: tuple[Tensor, Tensor],
        skipped: tuple[Tensor, Tensor], drift: Drift | None,
    ) -> Tensor:  # fmt: skip
        """Relative error of rows that are known exactly, if they attended to their kept keys and to summary
        keys that drift (left out where `drift` is None), to both without the drift, or to the kept keys
        alone.

        rows [B, H, M, D] of the groups [B, H, M] int64, exact [B, H, M, Dv] fp32; kept and skipped: output
        [B, H, M, Dv] and log-sum-exp [B, H, M] over the kept keys and over the summary keys, fp32
        -> [candidates, B, H, M] fp32
        """
        return plain.candidate_errors(rows, group, exact, kept, skipped, drift, self.matmul)

    def best_candidate(
        self, errors: Tensor, weights: Tensor, bare: Tensor, handicap: float
    ) -> tuple[Tensor, Tensor]:
        """The candidate of every head with the least mean error by `weights`; a later one must have less than
        `handicap` times the error of the best before it. Heads that are `bare` take the last.

        errors [candidates, B, H, M] fp32, weights [B, H, M] fp32, bare [B, H] bool -> number [B, H] int64,
        error [B, H] fp32
        """
        return plain.best_candidate(errors, weights, bare, handicap)

    def switch_summary(self, summary: SummaryKeys, choice: Tensor) -> SummaryKeys:
        """The summary as the heads chose it: without its drift, or without any key; maybe in place.

        choice [B, H] int64, numbers of `Choice`
        """
        return plain.switch_summary(summary, choice)

    def add_affine(
        self, out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """`out + out @ left @ right + bias` in one pass, cast to `dtype`; may reuse the memory of `out`.

        out [B, H, N, Dv] fp32, left [B, H, Dv, R], right [B, H, R, Dv], bias [B, H, Dv]
        """
        return plain.add_affine(out, left, right, bias, dtype)

    def row_peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest finite magnitude of every row, and whether the whole row is finite.

        x [B, H, N, D] -> peaks [B, H, N] fp32 (fp64 for fp64 rows), finite [B, H, N] bool
        """
        return plain.row_peaks(x)

    def lost_channels(self, v: Tensor, mask: Tensor | None) -> Tensor:
        """Which channels of v [B, H, N, D] hold NaN or Inf where mask [B, N] is not False: asked at the end
        of a call, so that a backend may have looked on the way.  # [B, H, D] bool"""
        bad = ~torch.isfinite(v)
        if mask is not None:
            bad &= mask[:, None, :, None]
        return bad.any(2)

    def only_finite(self, x: Tensor) -> Tensor:
        """x in fp32, with zeros for NaN and Inf; maybe x itself."""
        return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of symmetric matrices.

        matrix [..., n, n] fp64 -> values [..., n], vectors [..., n, n] in columns
        """
        return plain.eigh(matrix)

    def leading_basis(self, matrix: Tensor, rank: int) -> Tensor:
        """Orthonormal columns that span about the `rank` leading eigenvectors of matrix [..., n, n]."""
        return leading_basis(matrix.double(), rank)

    def leading_factor(self, metric: Tensor, rank: int) -> Tensor:
        """F with F F^T = the metric [..., D, D] in its leading space, over its mean eigenvalue there; any
        rotation of its columns will do.  # [..., D, rank] fp32"""
        return leading_factor(metric, rank)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y in fp32 for small matrices. In a backend that is deterministic across batches a product does
        not depend on the others beside it, which `torch.matmul` does not promise.

        x [..., M, K], y [..., K, N] with the same leading dimensions -> [..., M, N] fp32
        """
        return x.float() @ y.float()

    def shared_directions(
        self, spread: Tensor, covariance: Tensor, rank: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The `rank` directions in which both queries and keys vary most, as maps to coordinates with
        y_q . y_k = scale * q . k as far as they go; the keys' coordinates have unit variance.

        spread [..., D, D] fp64 of queries around their anchors, covariance [..., D, D] fp64 of keys around
        their centroids -> map of queries, map of keys, [..., D, rank] fp32 each
        """
        return plain.shared_directions(spread, covariance, rank, scale)

    def fit_residual(
        self, x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
    ) -> ResidualFit:
        """The paper's fit: a weighted ridge regression from probe outputs to their residuals, restricted to
        the leading `rank` directions of the residuals if `subspace` (section 4.2, appendix A).

        A probe whose own output is not finite is left out: its row is lost anyway. A probe whose residual
        alone is not finite has met NaN or Inf among the skipped keys, and passes it on to every row, as dense
        attention would.

        x [..., M, Dv], residual [..., M, Dv], weights [..., M]
        """
        return plain.fit_residual(x, residual, weights, rank, ridge, subspace)

    def second_moment(self, x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
        """Mean of x^T x over the rows that are counted and finite, around their mean if `centred`.

        x [B, H, M, D], counted [B, H, M] bool or None -> [B, H, D, D] fp64, zeros where no row counts
        """
        return plain.second_moment(x, counted, centred)

    def sort_groups(self, labels: Tensor, groups: int) -> Partition:
        """Sorts tokens by label, stably: `Partition.from_labels`."""
        return Partition.from_labels(labels, groups)

    def spend(self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
        """Keeps the cells with the most mass per pair, over all cells of a head at once, within the budget.

        Every non-empty query group keeps its best cell even if the budget does not cover it. Equal scores go
        to the lower index. A score that is NaN comes first: what is wrong must reach the output.

        log_share [B, H, Cq, Ck] log of the share of a row's mass, query_sizes [B, H, Cq],
        kv_sizes [B, H, Ck], budget [B, H] int64 pairs -> cells [B, H, Cq, Ck] bool
        """
        return plain.spend(log_share, query_sizes, kv_sizes, budget)

    def spend_each(
        self, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor]
    ) -> Tensor:
        """`spend` for several budgets [B, H] over the same cells.  # [n, B, H, Cq, Ck] bool"""
        return torch.stack([self.spend(log_share, query_sizes, kv_sizes, budget) for budget in budgets])

    def best_cells(
        self, log_mass: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budgets: Sequence[Tensor], free: int
    ) -> Tensor:
        """`spend_each` on the first `free` K/V groups, by the share of a row's mass over all of them: what is
        pinned is paid for already, and its mass is the row's own. Groups of NaN are kept whatever they cost.

        log_mass [B, H, Cq, Ck] as from `cell_scores`, sizes [B, H, Cq] and [B, H, Ck] int64, budgets [B, H]
        int64 each -> [budgets, B, H, Cq, free] bool
        """
        broken = log_mass.isnan()
        log_share = torch.where(broken, -torch.inf, log_mass).log_softmax(-1)[..., :free]
        found = self.spend_each(log_share, query_sizes, kv_sizes[..., :free], budgets)
        occupied = (query_sizes[..., None] > 0) & (kv_sizes[..., None, :free] > 0)
        return found | (broken[..., :free] & occupied)

    def missed_mass(self, log_mass: Tensor, cells: Tensor) -> Tensor:
        """Share of each query group's mass in the cells that are not kept; groups of NaN count as nothing.

        log_mass [B, H, Cq, Ck], cells [n, B, H, Cq, Ck] bool -> [n, B, H, Cq] fp32
        """
        mass = torch.where(log_mass.isnan(), -torch.inf, log_mass)
        share = torch.where(mass == -torch.inf, 0.0, mass.softmax(-1))  # a row without any mass misses none
        return torch.where(cells, 0.0, share).sum(-1)

    def spoil(self, out: Tensor, lost: Tensor) -> Tensor:
        """NaN for what is finite in the channels that are `lost`, maybe in place.

        out [B, H, N, Dv], lost [B, H, 1, Dv] bool -> as out
        """
        if out.device.type == "cpu" and not lost.any():  # a GPU must not wait for the answer
            return out
        return torch.where(lost & out.isfinite(), torch.nan, out)

    def central_rows(self, x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
        """Visits the groups in turn and takes from each the row nearest to the group's mean that is not taken
        yet (ties: the lower index; NaN last). Rows of no group fill up what is left.

        x [B, H, N, R] fp32, labels [B, H, N], count <= N -> rows [B, H, count] int64
        """
        return plain.central_rows(x, labels, groups, count)


BACKENDS: Registry[Backend] = Registry("backend")

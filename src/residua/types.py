"""The data types of one attention call, with their shapes. Letters as everywhere: `B` batch, `H` query heads,
`Hkv` key/value heads, `N` tokens (`Nq`, `Nk`), `D` head dim (`Dv` of the values), `Cq`/`Ck` query and K/V
groups, `M` probe rows, `R` rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

MAX_BEND = 0.5  # the most that the second-order term of a drift may add to a log-weight


@dataclass(frozen=True)
class Rows:
    """A set of token indices as sorted, disjoint ranges. One range is a view of a tensor, never a copy."""

    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def index(self, device: torch.device) -> Tensor:
        """The indices, ascending.  # [count]"""
        parts = [torch.arange(start, stop, device=device) for start, stop in self.ranges]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=device)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The chosen slices of `x` along `dim`; not a copy if the set is one range."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return x.narrow(dim, start, stop - start)
        return x.index_select(dim, self.index(x.device))

    def complement(self, total: int) -> Rows:
        """The indices of `range(total)` that are not in this set."""
        edges = [0, *(edge for pair in self.ranges for edge in pair), total]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return Rows(tuple((start, stop) for start, stop in pairs if stop > start))


@dataclass(frozen=True)
class Call:
    """The tensors of one call, checked by `inputs.validate`; every later stage trusts them."""

    q: Tensor  # [B, H, Nq, D]
    k: Tensor  # [B, Hkv, Nk, D]
    v: Tensor  # [B, Hkv, Nk, Dv]
    scale: float
    free_queries: Rows  # grouped and routed
    exact_queries: Rows  # computed against every key
    free_keys: Rows  # grouped and routed
    pinned_keys: Rows  # kept for every query group
    key_mask: Tensor | None = None  # [B, Nk] bool, False = padding
    broken_keys: Tensor | None = None  # [B, Hkv, Nk] bool, keys that are not finite; None: none, or unchecked
    broken_channels: Tensor | None = None  # [B, Hkv, Dv] bool, channels in which a value is not finite

    @property
    def heads_per_kv(self) -> int:
        """Query heads per K/V head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def valid_keys(self) -> Tensor:
        """Keys that are not padding.  # [B] int64"""
        if self.key_mask is None:
            return torch.full((self.k.shape[0],), self.k.shape[2], dtype=torch.long, device=self.k.device)
        return self.key_mask.sum(-1)

    @property
    def valid_pinned_keys(self) -> Tensor:
        """Pinned keys that are not padding.  # [B] int64"""
        if self.key_mask is None:
            return torch.full((self.k.shape[0],), self.pinned_keys.count, dtype=torch.long, device=self.k.device)
        return self.pinned_keys.take(self.key_mask, 1).sum(-1)

    @property
    def routable(self) -> bool:
        """Whether there is anything to group: rows that are not exact, and keys that are not pinned."""
        return bool(self.q.numel() and self.free_queries.count and self.free_keys.count)


@dataclass(frozen=True)
class Partition:
    """Tokens sorted into groups. Group `g` of a head holds `order[offsets[g]:offsets[g + 1]]`; tokens without
    a group (padding, or rows that are computed exactly) come last in `order` and have the label -1."""

    labels: Tensor  # [B, H, N] int64
    order: Tensor  # [B, H, N] int64, a permutation of the tokens, ascending inside a group
    offsets: Tensor  # [B, H, C + 1] int64

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return self.offsets.shape[-1] - 1

    @cached_property
    def sizes(self) -> Tensor:
        """Tokens of each group.  # [B, H, C] int64"""
        return self.offsets.diff(dim=-1)  # [B, H, C]

    @staticmethod
    def from_labels(labels: Tensor, groups: int) -> Partition:
        """Sorts tokens by label, stably.

        Args:
            labels: [B, H, N] int64, from -1 (no group) to `groups` - 1.
            groups: How many groups there are.

        Returns:
            The partition.
        """
        bins = torch.where(labels < 0, groups, labels)
        order = bins.argsort(dim=-1, stable=True)  # [B, H, N]
        counts = torch.zeros(*labels.shape[:-1], groups + 1, dtype=torch.long, device=labels.device)
        counts.scatter_add_(-1, bins, torch.ones_like(bins))
        offsets = torch.nn.functional.pad(counts[..., :groups].cumsum(-1), (1, 0))
        return Partition(labels, order, offsets)


@dataclass(frozen=True)
class Grouping:
    """Both partitions of a call and the geometry they came from. Pinned keys, if any, form the last K/V group
    (`pinned_groups` = 1)."""

    query: Partition  # H heads
    kv: Partition  # Hkv heads
    query_centroids: Tensor  # [B, H, Cq, D] fp32, means in the original space
    kv_centroids: Tensor  # [B, Hkv, Ck, D] fp32, pinned groups last
    coordinates: Tensor  # [B, H, free queries, R] fp32, in which queries were clustered; empty if not kept
    pinned_groups: int = 0
    key_factor: Tensor | None = None  # [B, Hkv, D, R] fp32, the map to the coordinates of keys
    query_factor: Tensor | None = None  # [B, H, D, R] fp32, the same for queries; None: compared as they are
    age: int = 0  # calls since the tokens of all heads were clustered
    reused: Tensor | None = None  # [B, Hkv] bool, heads that keep the groups of the call before

    @cached_property
    def anchors(self) -> Tensor:
        """The query centroids with 0 for NaN and Inf: one broken row must not decide for its group.  # [B, H, Cq, D]"""
        return torch.nan_to_num(self.query_centroids, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class GroupMemory:
    """What a layer keeps of its groups for the next call. Centroids are in the dtype of the call: they are
    only a starting point."""

    query_centroids: Tensor  # [B, H, Cq, D]
    kv_centroids: Tensor  # [B, Hkv, Ck, D] without pinned groups
    query_labels: Tensor | None = None  # [B, H, Nq] int16 or int32; None: the next call clusters anew
    kv_labels: Tensor | None = None  # [B, Hkv, Nk]
    key_factor: Tensor | None = None
    query_factor: Tensor | None = None
    age: int = 0
    borrowed: bool = False  # whether it comes from another branch or transformer

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in vars(self).values() if isinstance(x, Tensor))

    @property
    def centroids(self) -> tuple[Tensor, Tensor]:
        return self.query_centroids, self.kv_centroids


@dataclass(frozen=True)
class Route:
    """Which cells (query group x K/V group) are computed exactly."""

    query: Partition  # H heads
    kv: Partition  # Hkv heads
    cells: Tensor  # [B, H, Cq, Ck] bool
    pinned_groups: int = 0  # trailing K/V groups that every query group keeps

    @cached_property
    def group_pairs(self) -> Tensor:
        """Query-key pairs of each kept cell, summed over query groups.  # [B, H, Ck] int64"""
        kv_sizes = self.kv.sizes.repeat_interleave(self.cells.shape[1] // self.kv.sizes.shape[1], dim=1)
        rows = (self.cells * self.query.sizes[..., None]).sum(-2)  # [B, H, Ck]
        return rows * kv_sizes

    @property
    def pairs(self) -> Tensor:
        """All pairs that the sparse operator evaluates, pinned keys included.  # [B, H] int64"""
        return self.group_pairs.sum(-1)


@dataclass(frozen=True)
class Drift:
    """How the summary keys of a query group change together from row to row. With y = q @ basis - origin, all
    their log-weights grow by min(sum(y^2 * curve), `MAX_BEND`) and all their values by y @ slope."""

    basis: Tensor  # [B, Hkv, D, R] fp32
    origin: Tensor  # [B, H, Cq, R] fp32, where the group's anchor lies
    curve: Tensor  # [B, H, Cq, R] fp32, not negative
    slope: Tensor  # [B, H, Cq, R, Dv] fp32


class Choice(IntEnum):
    """What a head does about the pairs that it skips."""

    WITH_DRIFT = 0  # attends to the summary, which changes from row to row
    WITHOUT_DRIFT = 1  # attends to the summary as it is at the anchor
    WITHOUT_SUMMARY = 2  # drops them
    DENSE = 3  # skips none

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class SummaryKeys:
    """What stands for the skipped K/V groups of a query group: a few keys beside its cells, each with an
    additive log-weight, because one key may stand for many. Row i of query group a adds
    `scale * q_i . keys[a, t] + log_weight[a, t]` to its softmax."""

    keys: Tensor  # [B, H, Cq, T, D]
    values: Tensor  # [B, H, Cq, T, Dv]
    log_weight: Tensor  # [B, H, Cq, T] fp32; -inf switches a key off
    drift: Drift | None = None


@dataclass(frozen=True)
class Probes:
    """Query rows that are evaluated exactly, for the fit, or for the choice per head and the error estimate."""

    rows: Tensor  # [B, H, M] int64, distinct, indices of the original order
    weights: Tensor  # [B, H, M] fp32, |group| / probes in the group
    exact: Tensor  # [B, H, M, Dv] fp32, dense attention of those rows

    def residual(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """What a sparse output [B, H, Nq, Dv] misses at the probes, and that output at the probes; both
        [B, H, M, Dv]."""
        sparse = torch.take_along_dim(out, self.rows[..., None], dim=2)
        return self.exact - sparse, sparse

    def put(self, out: Tensor) -> Tensor:
        """Writes the exact rows into an output [B, H, Nq, Dv], in place."""
        index = self.rows[..., None].expand(*self.rows.shape, out.shape[-1])
        return out.scatter_(2, index, self.exact.to(out.dtype))


@dataclass(frozen=True)
class ResidualFit:
    """The paper's map from a sparse output x to what it misses: `bias + x @ left @ right`."""

    left: Tensor  # [..., Dv, R] fp32, includes the standardisation of x
    right: Tensor  # [..., R, Dv] fp32
    bias: Tensor  # [..., Dv] fp32
    left_out: Tensor  # [..., M, Dv] fp32, error at each probe of a fit without that probe

    def predict(self, x: Tensor) -> Tensor:
        """The residual expected at sparse outputs x [..., N, Dv]."""
        return x.float() @ self.left @ self.right + self.bias[..., None, :]


T = TypeVar("T", float, Tensor)


class HeadCost(NamedTuple):
    """What some work costs a head, in pair equivalents of D + Dv products: `fixed + per_key * keys`."""

    fixed: float = 0.0
    per_key: float = 0.0

    def at(self, keys: T) -> T:
        """The cost for that many keys (without padding): a number, or a tensor of numbers."""
        return self.fixed + self.per_key * keys

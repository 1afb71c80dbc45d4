"""Response coordinates, k-means, the partitioners, and the stage that sorts the tokens of a call into groups.

Keys are compared by how sampled queries respond to them, queries by how they respond to the key groups (the paper's
section 4.1 and appendix B). K-means is deterministic and always ends: the number of steps is fixed, and coordinates
that are not finite count as zero.

A partitioner only defines the coordinates in which keys and queries are compared; clustering, pinned tokens,
padding and warm starts are the same for all. A new one is a class with `@PARTITIONERS.register`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...config import PARTITIONS
from ...ops.backend import Backend
from ...registry import Registry
from ...types import Call, Grouping, Partition, Rows
from ...util.golden import ONE, golden_indices, golden_places
from ..rules import Rules
from ..stages import SizedCall


@dataclass(frozen=True)
class Space:
    """Where tokens are compared: their activations, or a linear map of them, perhaps brought to the same RMS."""

    factor: Tensor | None  # [B, H, D, R] fp32; None: the activations themselves
    normalise: bool
    backend: Backend
    rough: bool = False  # whether nobody but k-means reads the coordinates

    def coordinates(self, rows: Tensor) -> Tensor:
        """Rows [B, H, N, D] in this space.  # [B, H, N, R] fp32"""
        if self.factor is None:
            return rows.float()
        return self.backend.project(rows, self.factor, self.normalise, rough=self.rough)


def evenly_spaced(count: int, total: int, device: torch.device) -> Tensor:
    """`count` ascending indices spread over range(total), without a random generator.  # [count]"""
    return torch.arange(count, device=device) * total // max(1, count)


def key_metric(q: Tensor, rows: int, spacing: str, backend: Backend) -> Tensor:
    """M_K = Q_s^T Q_s / M_s over `rows` query rows (all if there are fewer), spaced as `Config.metric_spacing` says.

    q [..., N, D] -> [..., D, D] fp64. Rows with NaN or Inf are left out: they would spoil every group.
    """
    total = q.shape[-2]
    place = golden_indices if spacing == "golden" else evenly_spaced
    index = place(min(rows, total), total, q.device).expand(*q.shape[:-2], -1)
    return backend.second_moment(backend.gather_rows(q, index), None, centred=False)


def query_metric(centroids: Tensor, sizes: Tensor, backend: Backend) -> Tensor:
    """M_Q = K~^T K~ / (C+ D): non-empty groups only, centred by their uniform mean, each with equal weight.

    centroids [..., Ck, D], sizes [..., Ck] -> [..., D, D] fp64
    """
    return backend.second_moment(centroids, sizes > 0, centred=True) / centroids.shape[-1]


def metric_factor(metric: Tensor, rank: int, rules: Rules, backend: Backend) -> Tensor:
    """Leading eigenvectors, scaled by the root of their eigenvalues, which are normalised to unit mean first.

    metric [..., D, D] -> [..., D, rank] fp32, rank <= D
    """
    return backend.leading_factor(metric, rank, exact=rules.host_may_wait)


@dataclass(frozen=True)
class Clusters:
    """Labels, centres and sizes that are consistent: a centre is the mean of the rows with its label."""

    labels: Tensor  # [G, N] int64, -1 where a row is not valid
    centres: Tensor  # [G, C, R] fp32; an empty group keeps its old centre
    sizes: Tensor  # [G, C] int64


def kmeans(
    x: Tensor, groups: int, steps: int, *, start: Tensor | None = None, valid: Tensor | None = None, backend: Backend
) -> Clusters:
    """Clusters the rows of x [G, N, R] into `groups` groups per head with `steps` Lloyd steps.

    `start` [G, C, R] gives the first centres; without it they are rows spread over the sequence. `valid` [G,
    N] leaves rows out."""
    centres = first_centres(x, groups, valid) if start is None else start
    return Clusters(*backend.lloyd(x, centres, max(1, steps), valid))


def kmeans_labels(
    x: Tensor, groups: int, steps: int, *, start: Tensor | None = None, valid: Tensor | None = None, backend: Backend
) -> Tensor:
    """Only the labels of `kmeans`.  # [G, N] int64"""
    centres = first_centres(x, groups, valid) if start is None else start
    return backend.lloyd(x, centres, max(1, steps), valid, means=False)[0]


def first_rows(shape: tuple[int, int], groups: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """One row from each of `groups` equal parts of the sequence, counting valid rows only.  # [G, C]

    The position within a part follows the golden ratio."""
    heads, rows = shape
    if valid is None:
        return golden_indices(groups, rows, device).expand(heads, groups)
    ranked = torch.argsort(valid.logical_not().to(torch.uint8), dim=-1, stable=True)  # valid rows first
    return ranked.gather(-1, golden_places(groups, device) * valid.sum(-1, keepdim=True) // (groups * ONE))


def first_centres(x: Tensor, groups: int, valid: Tensor | None) -> Tensor:
    index = first_rows((x.shape[0], x.shape[1]), groups, valid, x.device)
    return torch.take_along_dim(x, index[..., None], dim=1)  # [G, C, R]


class Partitioner:
    """Coordinates as linear maps of the activations; None: the activations themselves are compared."""

    name: ClassVar[str]

    def key_factor(self, sized: SizedCall) -> Tensor | None:
        """The map for keys.  # [B, Hkv, D, R] fp32"""
        return None

    def query_factor(self, sized: SizedCall, centroids: Tensor, counts: Tensor) -> Tensor | None:
        """The map for queries, given the K/V groups' centroids [B, Hkv, Ck, D] and counts [B, Hkv, Ck]; the
        mapped queries are RMS-normalised.  # [B, Hkv, D, R] fp32"""
        return None


class Partitioners(Registry[Partitioner]):
    """The registered partitioners; a `Config` knows their names."""

    def add(self, one: Partitioner) -> None:
        super().add(one)
        PARTITIONS.add(one.name)

    def remove(self, name: str) -> None:
        super().remove(name)
        PARTITIONS.remove(name)


PARTITIONERS = Partitioners("partition")


@PARTITIONERS.register
class Semantic(Partitioner):
    """K-means on the activations of queries and of keys, separately: the reference partition."""

    name = "semantic"


@PARTITIONERS.register
class KeyResponse(Partitioner):
    """Keys by their responses under sampled queries; queries by their activations."""

    name = "key-response"

    def key_factor(self, sized: SizedCall) -> Tensor | None:
        call, sizes, backend = sized.call, sized.sizes, sized.backend
        rows = call.free_queries.take(call.q, 2)
        of_keys = key_metric(rows, sizes.metric_rows, sized.config.metric_spacing, backend)  # [B, H, D, D]
        if call.heads_per_kv > 1:
            # heads that share keys share a key metric: the mean of theirs
            of_keys = of_keys.unflatten(1, (call.k.shape[1], call.heads_per_kv)).mean(2)
        return metric_factor(of_keys, sizes.key_rank, sized.rules, backend)


@PARTITIONERS.register
class ResponseCoupled(KeyResponse):
    """The paper's partition: key groups from query responses, then query groups from key groups."""

    name = "response"

    def query_factor(self, sized: SizedCall, centroids: Tensor, counts: Tensor) -> Tensor | None:
        metric = query_metric(centroids, counts, sized.backend)
        return metric_factor(metric, sized.sizes.query_rank, sized.rules, sized.backend)


def group_tokens(
    sized: SizedCall,
    start: tuple[Tensor, Tensor] | None = None,
    *,
    keep_coordinates: bool = True,
    steps: int | None = None,
) -> Grouping:
    """Groups keys, then queries. `start` holds the centroids (queries, keys) of the step before, in the
    original space: the coordinates rotate from step to step, so the centroids are projected again. `steps` of
    k-means; None: as the config says for a cold or a warm start."""
    call, config, sizes, backend = sized.call, sized.config, sized.sizes, sized.backend
    partitioner = PARTITIONERS[config.partition]
    if steps is None:
        steps = config.kmeans_cold if start is None else config.kmeans_warm
    query_start, key_start = (None, None) if start is None else start

    keys = call.free_keys.take(call.k, 2)
    valid = None if call.key_mask is None else call.free_keys.take(call.key_mask, 1)
    key_factor = partitioner.key_factor(sized)
    space = Space(key_factor, normalise=False, backend=backend, rough=True)
    _, labels = _cluster(keys, space, sizes.kv_groups, steps, key_start, valid)
    kv, pinned_groups = _kv_partition(call, labels, sizes.kv_groups, backend)
    means = backend.group_means(call.k, kv, keep=True)  # [B, Hkv, Ck, D]
    kv_centroids = keep_empty(means, kv, _first_rows(keys, sizes.kv_groups, valid) if key_start is None else key_start)

    free = sizes.kv_groups
    factor = partitioner.query_factor(sized, kv_centroids[..., :free, :], kv.sizes[..., :free])
    if factor is not None and call.heads_per_kv > 1:
        factor = factor.repeat_interleave(call.heads_per_kv, dim=1)
    rows = call.free_queries.take(call.q, 2)
    space = Space(factor, normalise=True, backend=backend, rough=not keep_coordinates)
    coordinates, labels = _cluster(rows, space, sizes.query_groups, steps, query_start)
    query = backend.sort_groups(_spread(labels, call.free_queries, call.q.shape[2]), sizes.query_groups)
    means = backend.group_means(call.q, query)  # [B, H, Cq, D]
    query_centroids = keep_empty(
        means, query, _first_rows(rows, sizes.query_groups, None) if query_start is None else query_start
    )
    # dropped if not needed: they are as large as q, and only stratified probes use them
    kept = coordinates if keep_coordinates else coordinates.new_empty(0)
    return Grouping(query, kv, query_centroids, kv_centroids, kept, pinned_groups, key_factor, factor)


def _cluster(
    x: Tensor, space: Space, groups: int, steps: int, start: Tensor | None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Coordinates [B, H, N, R] and labels [B, H, N] of the rows of x [B, H, N, D]."""
    batch, heads = x.shape[:2]
    coordinates = space.coordinates(x)
    if valid is not None:
        valid = valid[:, None].expand(batch, heads, -1).flatten(0, 1)
    centres = None if start is None else space.coordinates(start.to(x.dtype)).flatten(0, 1)
    flat = coordinates.flatten(0, 1)
    labels = kmeans_labels(flat, groups, steps, start=centres, valid=valid, backend=space.backend)
    return coordinates, labels.unflatten(0, (batch, heads))


def _kv_partition(call: Call, labels: Tensor, groups: int, backend: Backend) -> tuple[Partition, int]:
    """Free keys in their groups, pinned keys in one more group after them, padding in no group."""
    labels = _spread(labels, call.free_keys, call.k.shape[2])
    if not call.pinned_keys.count:
        return backend.sort_groups(labels, groups), 0
    for start, stop in call.pinned_keys.ranges:
        labels[..., start:stop] = groups
    if call.key_mask is not None:
        labels = torch.where(call.key_mask[:, None], labels, -1)
    return backend.sort_groups(labels, groups + 1), 1


def _spread(labels: Tensor, rows: Rows, total: int) -> Tensor:
    """Labels of some rows as labels of all tokens; the others get -1.  # [B, H, total]"""
    if rows.count == total:
        return labels
    spread = labels.new_full((*labels.shape[:-1], total), -1)
    done = 0
    for start, stop in rows.ranges:
        spread[..., start:stop] = labels[..., done : done + stop - start]
        done += stop - start
    return spread


def keep_empty(means: Tensor, partition: Partition, start: Tensor) -> Tensor:
    """Centroids in which an empty group stays at its `start` [B, H, C, D].

    means [B, H, C or more, D]: pinned groups, which have no start, come last
    """
    groups = start.shape[2]
    filled = torch.where(partition.sizes[..., :groups, None] > 0, means[..., :groups, :], start.float())
    return torch.cat([filled, means[..., groups:, :]], dim=-2) if means.shape[-2] > groups else filled


def _first_rows(rows: Tensor, groups: int, valid: Tensor | None) -> Tensor:
    """Start of the groups in a first call: rows of the sequence.  # [B, H, C, D]"""
    if valid is not None:
        valid = valid[:, None].expand(rows.shape[:3]).flatten(0, 1)
    shape = (rows.shape[0] * rows.shape[1], rows.shape[2])
    index = first_rows(shape, groups, valid, rows.device).view(*rows.shape[:2], groups)
    return torch.take_along_dim(rows, index[..., None], dim=2)

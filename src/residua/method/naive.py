"""The default method for one head, in plain torch, written for reading: `anchored` from top to bottom.

It imports nothing from the rest of the package, and is the oracle of a test: on the same sizes it keeps the same cells
and returns the same output as `residua.attention`, but for rounding. It has no text tokens, padding, grouped heads or
warm starts, and builds matrices that long calls have no memory for. Letters: `N` tokens, `D` head dim (`Dv` of the
values), `Cq`/`Ck` query and K/V groups, `T` summary slots, `R` rank of the drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN, ONE = 40503, 1 << 16  # their ratio is the golden ratio: evenly spaced rows alias with a picture's width
HASH, DRAWS = 2654435761, 1 << 20  # Knuth's multiplier: draws without a random generator
Result = tuple[Tensor, Tensor, str, float]


class HeadSizes(NamedTuple):  # of a call: `residua.method.sizes` chooses them
    density: float  # what the call may cost, as a share of dense attention: everything but the grouping
    query_groups: int
    kv_groups: int
    key_rank: int
    query_rank: int
    metric_rows: int
    kmeans_steps: int
    probes: int
    single_slots: int
    merged_slots: int  # at least 1
    drift_rank: int  # at least 1


class TokenGroups(NamedTuple):
    labels: Tensor  # [N] int64, the group of every row
    sizes: Tensor  # [C] int64
    centroids: Tensor  # [C, D], the mean of each group; an empty group has a row of the sequence
    offsets: Tensor  # [N, D], every row minus its centroid

    @staticmethod
    def of(x: Tensor, labels: Tensor, count: int) -> TokenGroups:
        sizes = torch.bincount(labels, minlength=count)
        means = x.new_zeros(count, x.shape[1]).index_add_(0, labels, x) / sizes.clamp(min=1)[:, None]
        centroids = torch.where(sizes[:, None] > 0, means, x[golden_rows(count, len(x))])
        return TokenGroups(labels, sizes, centroids, x - centroids[labels])


class Head(NamedTuple):
    q: Tensor  # [N, D]
    k: Tensor  # [N, D]
    v: Tensor  # [N, Dv]
    scale: float
    queries: TokenGroups
    keys: TokenGroups


class Summary(NamedTuple):
    """What stands for the skipped K/V groups of every query group: a few keys, which drift from row to row."""

    keys: Tensor  # [Cq, T, D]
    values: Tensor  # [Cq, T, Dv]
    log_weight: Tensor  # [Cq, T], -inf for an empty slot
    basis: Tensor  # [D, R], the directions of the drift
    curve: Tensor  # [Cq, R], how log-weights grow with the square of a row's distance from its anchor
    slope: Tensor  # [Cq, R, Dv], how values move with that distance


def anchored(q: Tensor, k: Tensor, v: Tensor, s: HeadSizes, groups: Sequence[TokenGroups] = ()) -> Result:
    """Sparse attention of q [N, D] over k [N, D] and v [N, Dv]. `groups` (of queries and keys) replace those of
    k-means: where rounding moves a row between two centres, nothing after it could be compared.
    -> output [N, Dv], cells that are computed [Cq, Ck] bool, what stands for the others, estimated error of a row
    """
    head = Head(q, k, v, q.shape[1] ** -0.5, *(groups or group_tokens(q, k, s)))
    # The anchor of a query group is its centroid. What every K/V group weighs there decides what is computed.
    logits = head.queries.centroids @ k.T * head.scale  # [Cq, N]
    log_mass = torch.stack([logits[:, head.keys.labels == b].logsumexp(1) for b in range(s.kv_groups)], 1)  # [Cq, Ck]
    cells, summarised = route(head, log_mass, s)
    summary = summarise(head, log_mass, cells, s)
    still = summary._replace(curve=0 * summary.curve, slope=0 * summary.slope)
    nothing = still._replace(log_weight=torch.full_like(still.log_weight, -torch.inf))
    candidates = {"with drift": summary, "without drift": still} if summarised else {}
    # One row from each of a few parts of the groups is computed exactly: by their errors the head chooses.
    edges = torch.arange(s.probes + 1) * len(q) // s.probes
    drawn = torch.arange(s.probes) * HASH % DRAWS * edges.diff() // DRAWS
    rows = head.queries.labels.argsort(stable=True)[edges[:-1] + drawn]
    exact = (q[rows] @ k.T * head.scale).softmax(1) @ v
    choice, error = "", math.inf
    for name, candidate in {**candidates, "without summary": nothing}.items():
        missed = (attend(head, rows, cells, candidate) - exact).norm(dim=1) / exact.norm(dim=1)
        mean = float(missed @ edges.diff().to(missed)) / len(q)
        if mean < 0.9 * error:  # a simpler candidate must be clearly better: noise must not decide
            choice, error, summary = name, mean, candidate
    return attend(head, torch.arange(len(q)), cells, summary).index_copy_(0, rows, exact), cells, choice, error


def group_tokens(q: Tensor, k: Tensor, s: HeadSizes) -> tuple[TokenGroups, TokenGroups]:
    """Keys share a group if queries respond to them alike, queries if they respond alike to these groups."""
    sample = q[golden_rows(s.metric_rows, len(q))]
    factor = metric_factor(sample.T @ sample / len(sample), s.key_rank)
    keys = TokenGroups.of(k, kmeans(k @ factor, s.kv_groups, s.kmeans_steps), s.kv_groups)
    filled = keys.centroids[keys.sizes > 0]
    centred = filled - filled.mean(0)
    y = q @ metric_factor(centred.T @ centred / (len(filled) * q.shape[1]), s.query_rank)
    y = y / y.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)  # only the direction counts
    return TokenGroups.of(q, kmeans(y, s.query_groups, s.kmeans_steps), s.query_groups), keys


def golden_rows(count: int, total: int) -> Tensor:
    """One index in each of `count` equal parts of range(total).  # [count]"""
    part = torch.arange(count)
    return (part * ONE + part * GOLDEN % ONE) * total // (count * ONE)


def metric_factor(metric: Tensor, rank: int) -> Tensor:
    """F such that |F^T (x - y)| is the metric's distance: leading eigenvectors by the roots of their eigenvalues, which
    are normalised to unit mean.  # [D, rank]"""
    values, vectors = torch.linalg.eigh(metric)
    values, vectors = values.flip(0)[:rank].clamp(min=0), vectors.flip(1)[:, :rank]
    return vectors * (values / values.mean()).sqrt()


def kmeans(x: Tensor, groups: int, steps: int) -> Tensor:
    """Labels after that many Lloyd steps from rows spread over the sequence. An empty group keeps its centre.  # [N]"""
    centres = x[golden_rows(groups, len(x))]
    for _ in range(steps):
        found = TokenGroups.of(x, (centres.square().sum(1) / 2 - x @ centres.T).argmin(1), groups)
        centres = torch.where(found.sizes[:, None] > 0, found.centroids, centres)
    return found.labels


def route(head: Head, log_mass: Tensor, s: HeadSizes) -> tuple[Tensor, bool]:
    """The cells that the budget pays for beside the summary, [Cq, Ck] bool, and True; or the cells that all of it pays
    for, and False, for a head that is better off without a summary."""
    rows, dim, value_dim = len(head.q), head.q.shape[1], head.v.shape[1]
    pair = dim + value_dim  # costs are in pairs: products of D + Dv numbers
    judging = 1.5 * s.probes * s.density * rows  # the most that it takes
    without = int(s.density * rows * rows) - s.probes * rows - math.ceil(s.query_groups * dim / pair * rows + judging)
    anchors = s.query_groups * (2 * dim + value_dim) / pair * rows
    attending = rows * (s.single_slots + s.merged_slots)
    drift = s.drift_rank * (2 * rows + s.query_groups * 2 * s.merged_slots * value_dim / pair)
    budget = without - math.ceil(anchors + attending + drift)
    log_share = log_mass.log_softmax(1)
    weighed = log_share + priority(head)
    cells, more = (spend(head, weighed, pairs) for pairs in (budget, without))
    lost = [float(((~x * log_share.exp()).sum(1) * head.queries.sizes).sum()) for x in (cells, more)]
    # The score between a row's distance from its anchor and a key's from its centroid is what no summary sees.
    unseen = head.scale**2 * float((scatter(head.queries) * scatter(head.keys)).sum())
    if lost[1] <= min(0.2, 0.5 * unseen) * lost[0] or unseen > 20 or budget < without / 10:
        return spend(head, log_share, without), False
    return cells, True


def priority(head: Head) -> Tensor:
    """Log of the error that a unit of mass leaves if its group is summarised: how far apart the group's keys are, times
    how far apart its values are, relative to the other groups. From every fourth key.  # [Ck]"""
    sample = head.keys.labels.argsort(stable=True)[::4]
    label, found = head.keys.labels[sample], torch.zeros_like(head.keys.sizes).to(head.k)
    for x in (head.k, head.v):
        apart = x[sample].diff(dim=0).square().sum(1)
        # NaN where no two neighbours in the sample are of the group
        mean = torch.stack([apart[(label[1:] == b) & (label[:-1] == b)].mean() for b in range(len(found))])
        found += 0.5 * (mean / mean.nanmean()).nan_to_num(1.0).clamp(min=1e-4).log()
    return found


def spend(head: Head, log_share: Tensor, budget: int) -> Tensor:
    """The best cell of every query group, then those with the most mass per pair. A cell that does not fit is passed
    over, and the rest of the budget is offered again.  # [Cq, Ck] bool"""
    cost = head.queries.sizes[:, None] * head.keys.sizes
    value = torch.where(cost > 0, log_share - head.keys.sizes.clamp(min=1).log(), -torch.inf)
    best = torch.zeros_like(cost).scatter_(1, value.argmax(1, keepdim=True), 1) * cost > 0
    order = value.flatten().argsort(descending=True, stable=True)
    cost, taken = cost.flatten()[order], best.flatten()[order]
    for _ in range(4):
        left = budget - (cost * taken).sum()
        fits = ~taken & (cost > 0) & (cost <= left)
        taken |= fits & ((cost * fits).cumsum(0) <= left)
    return torch.zeros_like(taken).scatter_(0, order, taken).view_as(best)


def scatter(groups: TokenGroups) -> Tensor:
    """Second moment of rows around the centroids of their groups, from at most 512 of them.  # [D, D]"""
    order, count = groups.labels.argsort(stable=True), min(512, len(groups.labels))
    off = groups.offsets[order[torch.arange(count) * len(order) // count]]
    return off.T @ off / count


def summarise(head: Head, log_mass: Tensor, cells: Tensor, s: HeadSizes) -> Summary:
    """Around its anchor a skipped group acts on the rows of a query group like one key: the softmax-weighted mean of
    its keys and values there. The heaviest have a slot of their own, the others share one with their neighbours."""
    (_, k, v, scale, queries, keys), slots = head, s.single_slots + s.merged_slots
    near = kmeans(keys.centroids, s.merged_slots, 8)  # [Ck], each group's neighbourhood
    mean_keys, mean_values = k.new_zeros(len(cells), slots, k.shape[1]), v.new_zeros(len(cells), slots, v.shape[1])
    log_weight = k.new_full((len(cells), slots), -torch.inf)
    share, shared = torch.zeros_like(log_mass), k.new_zeros(len(cells), s.merged_slots)
    for a in ((~cells & (keys.sizes > 0)).any(1) & (queries.sizes > 0)).nonzero()[:, 0]:
        mass = log_mass[a].masked_fill(cells[a], -torch.inf)  # [Ck], of what is skipped
        heaviest = mass.argsort(descending=True, stable=True)[: s.single_slots]
        slot = (near + s.single_slots).index_copy_(0, heaviest, torch.arange(len(heaviest)))
        slot_mass = torch.stack([mass[slot == t].logsumexp(0) for t in range(slots)])
        skipped = ~cells[a][keys.labels]  # [N]
        place = slot[keys.labels[skipped]]
        weight = (k[skipped] @ queries.centroids[a] * scale - slot_mass[place]).exp()[:, None]  # sums to 1 in a slot
        mean_keys[a].index_add_(0, place, weight * k[skipped])
        mean_values[a].index_add_(0, place, weight * v[skipped])
        log_weight[a] = slot_mass - scale * (mean_keys[a] @ queries.centroids[a])
        share[a], shared[a] = mass.softmax(0), slot_mass.softmax(0)[s.single_slots :]
    # The drift: how keys and values vary together inside the groups, and among the groups that share a slot.
    basis, to_key = shared_directions(scatter(queries), scatter(keys), s.drift_rank, scale)
    values, filled = TokenGroups.of(v, keys.labels, s.kv_groups), keys.sizes > 0
    around, value_around = (TokenGroups.of(x.centroids[filled], near[filled], s.merged_slots) for x in (keys, values))
    parts = [(keys.offsets, values.offsets, near[keys.labels]), (around.offsets, value_around.offsets, near[filled])]
    curve, slope = k.new_zeros(len(cells), s.drift_rank), k.new_zeros(len(cells), s.drift_rank, v.shape[1])
    for p in range(s.merged_slots):
        for weight, (off, value_off, pool) in zip((share[:, near == p].sum(1), shared[:, p]), parts, strict=True):
            y, z = off[pool == p] @ to_key, value_off[pool == p]
            curve += weight[:, None] * (0.5 * y.square().sum(0) / max(1, len(y)))
            slope += weight[:, None, None] * (y.T @ z / max(1, len(y)))
    return Summary(mean_keys, mean_values, log_weight, basis, curve, slope)


def shared_directions(queries: Tensor, keys: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Maps to the coordinates in which both vary most: y_q . y_k = scale * q . k as far as they go, and the keys'
    coordinates have unit variance. From second moments, by orthogonal iteration.  # [D, R] each"""
    eye = torch.eye(len(keys), dtype=keys.dtype)
    root = torch.linalg.cholesky(keys + 1e-4 * keys.diagonal().mean() * eye)
    both = root.T @ queries @ root
    angles = torch.outer(torch.arange(len(keys)).to(keys) + 0.5, torch.arange(rank).to(keys)) * math.pi / len(keys)
    leading = angles.cos()
    for _ in range(12):
        leading = torch.linalg.qr((both / both.abs().max() + 1e-6 * eye) @ leading).Q
    return scale * root @ leading, torch.linalg.solve_triangular(root.T, leading, upper=True)


def attend(head: Head, rows: Tensor, cells: Tensor, summary: Summary) -> Tensor:
    """Those rows over the kept keys of their groups and the summary, in one softmax.  # [rows, Dv]"""
    labels, out = head.queries.labels[rows], head.v.new_zeros(len(rows), head.v.shape[1])
    for a in labels.unique():
        kept = cells[a][head.keys.labels]  # [N]
        q, v = head.q[rows[labels == a]], head.v[kept]
        y = (q - head.queries.centroids[a]) @ summary.basis  # [rows, R], the distance from the anchor
        weight = summary.log_weight[a] + (y.square() @ summary.curve[a]).clamp(max=0.5)[:, None]
        logits = torch.cat([q @ head.k[kept].T * head.scale, q @ summary.keys[a].T * head.scale + weight], 1)
        shares = logits.softmax(1)
        moved = shares[:, len(v) :].sum(1, keepdim=True) * (y @ summary.slope[a])
        out[labels == a] = shares @ torch.cat([v, summary.values[a]]) + moved
    return out

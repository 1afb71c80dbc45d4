"""The paper's method for one head, in numpy and fp64, stage by stage, written for reading (`Config.paper()`).

It imports nothing from the rest of the package, and is the oracle of `dev/benchmarks/paper_agreement.py` and of a test.
Where the paper leaves a choice open, it takes ours (docs/decisions/0010-what-the-paper-leaves-open.md). It has no text
tokens, padding, grouped heads or warm starts. Letters as in naive.py.
"""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
GOLDEN = 40503  # / 2^16 is the golden ratio
MIN_RMS = 1e-6
SCALE_EPS = 1e-6


@dataclass(frozen=True)
class PaperSettings:
    """The numbers of a call; the names are those of `residua.Config`."""

    density: float
    query_groups: int
    kv_groups: int
    key_rank: int
    query_rank: int
    metric_rows: int
    kmeans_steps: int
    probes: int
    residual_rank: int
    ridge: float


@dataclass(frozen=True)
class PaperResult:
    out: Array  # [N, Dv]
    key_labels: Array  # [N]
    query_labels: Array  # [N]
    cells: Array  # [Cq, Ck] bool
    rows: Array  # [M] probes
    weights: Array  # [M]


def paper(q: Array, k: Array, v: Array, s: PaperSettings, labels: tuple[Array, Array] | None = None) -> PaperResult:
    """The whole call of one head; q, k [N, D] and v [N, Dv] in fp64.

    `labels` (of queries, of keys) replace the two k-means runs. Rounding decides where a row between two
    centres goes; if it goes elsewhere, nothing after it can be compared.
    """
    scale = q.shape[1] ** -0.5
    sampled = q[np.arange(s.metric_rows) * len(q) // s.metric_rows]
    key_factor = metric_factor(sampled.T @ sampled / len(sampled), s.key_rank)
    key_labels = kmeans(k @ key_factor, s.kv_groups, s.kmeans_steps) if labels is None else labels[1]

    filled = np.unique(key_labels)
    centroids = np.stack([k[key_labels == b].mean(0) for b in filled])
    centred = centroids - centroids.mean(0)
    query_metric = centred.T @ centred / (len(filled) * q.shape[1])
    y = q @ metric_factor(query_metric, s.query_rank)  # [N, R]
    y /= np.maximum(np.sqrt((y**2).mean(1, keepdims=True)), MIN_RMS)
    query_labels = kmeans(y, s.query_groups, s.kmeans_steps) if labels is None else labels[0]

    share = cell_shares(q, k, query_labels, key_labels, s, scale)
    budget = int(s.density * len(q) * len(k)) - s.probes * len(k)
    query_sizes = np.bincount(query_labels, minlength=s.query_groups)
    key_sizes = np.bincount(key_labels, minlength=s.kv_groups)
    cells = spend(share, query_sizes, key_sizes, budget)

    sparse = np.empty((len(q), v.shape[1]))
    for a in range(s.query_groups):
        seen = cells[a][key_labels]
        rows = query_labels == a
        sparse[rows] = attend(q[rows], k[seen], v[seen], scale)

    rows, weights = choose_probes(y, query_labels, s)
    exact = attend(q[rows], k, v, scale)
    out = sparse + fitted_residual(sparse[rows], exact - sparse[rows], weights, s, sparse)
    out[rows] = exact
    return PaperResult(out, key_labels, query_labels, cells, rows, weights)


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    logits = q @ k.T * scale
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


def metric_factor(metric: Array, rank: int) -> Array:
    """Leading eigenvectors times the roots of their eigenvalues, which have unit mean.  # [D, R]"""
    values, vectors = np.linalg.eigh(metric)
    values, vectors = values[::-1][:rank].clip(0), vectors[:, ::-1][:, :rank]
    return vectors * np.sqrt(values / values.mean())


def kmeans(x: Array, groups: int, steps: int) -> Array:
    """Labels after `steps` Lloyd steps from rows spread over the sequence. An empty group keeps its
    centre."""
    part = np.arange(groups, dtype=np.int64)
    places = (part << 16) + part * GOLDEN % (1 << 16)
    centres = x[places * len(x) // (groups << 16)].copy()
    for _ in range(steps):
        labels = ((centres**2).sum(1) / 2 - x @ centres.T).argmin(1)
        for c in np.unique(labels):
            centres[c] = x[labels == c].mean(0)
    return labels


def cell_shares(q: Array, k: Array, query_labels: Array, key_labels: Array, s: PaperSettings, scale: float) -> Array:
    """The share of attention mass of every K/V group at the centroid of every query group.  # [Cq, Ck]"""
    share = np.zeros((s.query_groups, s.kv_groups))
    for a in np.unique(query_labels):
        logits = k @ q[query_labels == a].mean(0) * scale
        mass = np.bincount(key_labels, np.exp(logits - logits.max()), minlength=s.kv_groups)
        share[a] = mass / mass.sum()
    return share


def spend(share: Array, query_sizes: Array, key_sizes: Array, budget: int) -> Array:
    """The best cell of every query group, then the cells with the most mass per pair. A cell that does not
    fit is passed over; four passes.  # [Cq, Ck] bool"""
    cost = query_sizes[:, None] * key_sizes[None, :]
    value = np.where(cost > 0, share / np.maximum(key_sizes, 1), -1.0)
    kept = np.zeros(cost.shape, dtype=bool)
    for a in np.flatnonzero(query_sizes):
        kept[a, value[a].argmax()] = True
    left = budget - cost[kept].sum()
    order = np.argsort(-value, axis=None, kind="stable")
    for _ in range(4):
        spent = 0
        fits = [i for i in order if not kept.flat[i] and 0 < cost.flat[i] <= left]
        for i in fits:
            spent += cost.flat[i]
            if spent > left:
                spent -= cost.flat[i]
                break
            kept.flat[i] = True
        left -= spent
    return kept


def choose_probes(y: Array, labels: Array, s: PaperSettings) -> tuple[Array, Array]:
    """Visits the groups in turn, in an order spread over their index, and takes the row nearest to the
    group's mean that is not taken yet. A probe weighs its group's size over the group's probes."""
    visits = np.argsort(np.arange(s.query_groups) * GOLDEN % (1 << 16), kind="stable")
    ranked = {}
    for a in np.unique(labels):
        rows = np.flatnonzero(labels == a)
        distance = ((y[rows] - y[rows].mean(0)) ** 2).sum(1)
        ranked[a] = rows[np.argsort(distance, kind="stable")]
    chosen: list[int] = []
    for turn in range(len(labels)):
        for a in visits:
            if a in ranked and turn < len(ranked[a]) and len(chosen) < s.probes:
                chosen.append(int(ranked[a][turn]))
    rows = np.array(chosen)
    sizes, probes = np.bincount(labels), np.bincount(labels[rows], minlength=labels.max() + 1)
    return rows, sizes[labels[rows]] / probes[labels[rows]]


def fitted_residual(x: Array, residual: Array, weights: Array, s: PaperSettings, sparse: Array) -> Array:
    """Weighted ridge regression from sparse outputs to residuals, in the leading directions of the residuals;
    evaluated at every row.  # [N, Dv]"""
    alpha = weights / weights.sum()
    mean_x, mean_r = alpha @ x, alpha @ residual
    spread = np.sqrt(alpha @ (x - mean_x) ** 2 + SCALE_EPS)
    root = np.sqrt(alpha * len(x))[:, None]
    features, targets = root * (x - mean_x) / spread, root * (residual - mean_r)
    directions = np.linalg.svd(targets, full_matrices=False)[2][: s.residual_rank]  # [R, Dv]
    gram = features.T @ features + s.ridge * np.eye(x.shape[1])
    map_ = np.linalg.solve(gram, features.T @ targets @ directions.T) @ directions  # [Dv, Dv]
    return mean_r + (sparse - mean_x) / spread @ map_

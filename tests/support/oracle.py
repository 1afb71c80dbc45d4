"""Direct computations in fp64 that share no code with the package: what the tests compare with."""

import math

import numpy as np
import torch
from torch import Tensor

from residua import Config, Partition, Route


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    queries: int = 300,
    keys: int | None = None,
    dim: int = 16,
    value_dim: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v with clusters, so that there is something to route."""
    kv_heads, keys = kv_heads or heads, queries if keys is None else keys
    spots = normal(8, dim, seed=seed + 1, dtype=torch.float64)
    q = normal(batch, heads, queries, dim, seed=seed + 2, dtype=torch.float64)
    k = normal(batch, kv_heads, keys, dim, seed=seed + 3, dtype=torch.float64)
    q = q + spots[torch.arange(queries) % 8]
    k = k + spots[torch.arange(keys) % 8]
    v = normal(batch, kv_heads, keys, value_dim or dim, seed=seed + 4, dtype=torch.float64)
    v = v + k[..., :1]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def small(**settings: object) -> Config:
    """A config for calls of a few hundred tokens, on the plain torch backend; its summary is small enough
    that such calls can afford it."""
    base: dict[str, object] = {
        "query_groups": 8,
        "kv_groups": 16,
        "key_rank": 8,
        "query_rank": 8,
        "probes": 16,
        "residual_rank": 4,
        "kmeans_cold": 5,
        "density": 0.3,
        "summary_slots": 8,
        "drift_rank": 2,
        "backend": "torch",
    }
    return Config(**{**base, **settings})


def paper(**settings: object) -> Config:
    """The same with the paper's reconstruction."""
    return small(**{"reconstruction": "probe", **settings})


def expand_heads(x: Tensor, heads: int) -> Tensor:
    return torch.stack([x[:, h * x.shape[1] // heads] for h in range(heads)], 1)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention in fp64 over the keys where mask [B, H, Nq, Nk] is True -> out, natural log-sum-exp."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (expand_heads(x, q.shape[1]).double() for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
    return weights @ v, lse


def route_mask(route: Route, queries: int, keys: int) -> Tensor:
    """Which keys every row sees, cell by cell from order and offsets.  # [B, H, Nq, Nk]"""
    batch, heads, cq, ck = route.cells.shape
    kv_heads = route.kv.order.shape[1]
    mask = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            for a in range(cq):
                first, last = route.query.offsets[b, h, a : a + 2].tolist()
                rows = route.query.order[b, h, first:last]
                for c in range(ck):
                    if route.cells[b, h, a, c]:
                        first, last = route.kv.offsets[b, g, c : c + 2].tolist()
                        mask[b, h, rows[:, None], route.kv.order[b, g, first:last]] = True
    return mask


def random_route(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    queries: int = 90,
    keys: int = 110,
    cq: int = 5,
    ck: int = 7,
    keep: float = 0.5,
    seed: int = 0,
    lowest: int = 0,
) -> Route:
    """Random labels (`lowest` -1 leaves some tokens without a group) and random cells."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = kv_heads or heads
    query = torch.randint(lowest, cq, (batch, heads, queries), generator=generator)
    kv = torch.randint(lowest, ck, (batch, kv_heads, keys), generator=generator)
    cells = torch.rand(batch, heads, cq, ck, generator=generator) < keep
    return Route(Partition.from_labels(query, cq), Partition.from_labels(kv, ck), cells)


def worst(out: Tensor, wanted: Tensor) -> float:
    """Largest error as a share of the largest value."""
    size = float(wanted.abs().max()) if wanted.numel() else 1.0
    return float((out.double() - wanted).abs().max()) / max(size, 1e-30) if wanted.numel() else 0.0


def choose_probes(coordinates: Tensor, labels: list[int], groups: int, count: int) -> list[int]:
    """The paper's algorithm A.1, line by line, for one head."""
    orders = {}
    for a in range(groups):
        members = [i for i, label in enumerate(labels) if label == a]
        if not members:
            continue
        rows = [[float(x) for x in coordinates[i]] for i in members]
        centre = [math.fsum(column) / len(members) for column in zip(*rows, strict=True)]
        distance = {i: math.dist(row, centre) for i, row in zip(members, rows, strict=True)}
        orders[a] = sorted(members, key=lambda i: (distance[i], i))
    probes, t = [], 0
    while len(probes) < count and any(t < len(order) for order in orders.values()):
        for a in sorted(orders):
            if t < len(orders[a]) and len(probes) < count:
                probes.append(orders[a][t])
        t += 1
    return probes


def closed_form(x, residual, weights, ridge, rank=None):
    """Equations A.9 to A.17 as they stand. -> mu_x, s_x, mu_R, B (projected if a rank is given)"""
    x, residual, weights = (np.asarray(t, dtype=np.float64) for t in (x, residual, weights))
    alpha = weights / weights.sum()
    mu_x, mu_r = alpha @ x, alpha @ residual
    s_x = np.sqrt(alpha @ (x - mu_x) ** 2 + 1e-6)
    bar_x, bar_r = (x - mu_x) / s_x, residual - mu_r
    w = np.diag(len(weights) * alpha)
    b = np.linalg.solve(bar_x.T @ w @ bar_x + ridge * np.eye(x.shape[1]), bar_x.T @ w @ bar_r)
    if rank is not None:
        _, _, vt = np.linalg.svd(np.sqrt(w) @ bar_r, full_matrices=False)
        psi = vt[:rank].T
        b = b @ psi @ psi.T
    return mu_x, s_x, mu_r, b


def predicted(x, solution):
    mu_x, s_x, mu_r, b = solution
    return mu_r + (np.asarray(x, dtype=np.float64) - mu_x) / s_x @ b

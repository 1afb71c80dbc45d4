"""Inputs and fp64 truths for the kernels that run in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.types import MAX_BEND, Drift, Partition, Route, SummaryKeys


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def ragged(batch: int, heads: int, tokens: int, groups: int, *, loose: bool = False, seed: int = 0) -> Partition:
    """Groups of very different sizes: the first holds about half of the tokens, the third is empty."""
    draw = torch.rand(batch, heads, tokens, generator=generator(seed))
    labels = (draw.square() * groups).long().clamp(max=groups - 1)
    if groups > 2:
        labels = torch.where(labels == 2, 0, labels)
    if loose:
        labels = torch.where(torch.rand(labels.shape, generator=generator(seed + 1)) < 0.1, -1, labels)
    return Partition.from_labels(labels, groups)


def random_route(query: Partition, kv: Partition, density: float, *, seed: int = 0, dead: bool = True) -> Route:
    batch, heads, _ = query.labels.shape
    cells = torch.rand(batch, heads, query.groups, kv.groups, generator=generator(seed)) < density
    if dead:
        cells[:, :, -1] = False  # a query group that keeps nothing
    return Route(query, kv, cells)


def dense_mask(route: Route) -> Tensor:
    """Which pairs a route computes.  # [B, H, Nq, Nk]"""
    _, heads, cq, ck = route.cells.shape
    shares = heads // route.kv.labels.shape[1]
    cells = torch.nn.functional.pad(route.cells, (0, 1, 0, 1))  # label -1 reads the False at the end
    keys = route.kv.labels.repeat_interleave(shares, 1)
    rows = cells.gather(2, route.query.labels.remainder(cq + 1)[..., None].expand(-1, -1, -1, ck + 1))
    return rows.gather(3, keys.remainder(ck + 1)[:, :, None].expand(-1, -1, rows.shape[2], -1))


def random_drift(batch: int, heads: int, kv_heads: int, groups: int, dim: int, rank: int) -> Drift:
    """Bends on both sides of the limit, origins that leave little of the coordinates."""
    return Drift(
        random(batch, kv_heads, dim, rank, seed=11) / dim**0.5,
        random(batch, heads, groups, rank, seed=12),
        random(batch, heads, groups, rank, seed=13).abs() / (2 * rank),
        random(batch, heads, groups, rank, dim, seed=14) / rank,
    )


def attention_truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    route: Route | None = None,
    summary: SummaryKeys | None = None,
) -> tuple[Tensor, Tensor]:
    """Masked attention in fp64, summary keys as further columns -> out, log-sum-exp"""
    shares = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(shares, 1) for t in (k, v))
    logits = (q.double() @ k.mT * scale).masked_fill(~mask, -torch.inf)
    if summary is None or route is None:
        return (logits.softmax(-1).nan_to_num(0) @ v), logits.logsumexp(-1)
    group = route.query.labels
    member = group.clamp(min=0)[..., None]
    keys, values, weight = (
        t.double().flatten(3).gather(2, member.expand(-1, -1, -1, t.flatten(3).shape[-1])).unflatten(3, t.shape[3:])
        for t in (summary.keys, summary.values, summary.log_weight)
    )  # [B, H, Nq, T, ...]
    tail = torch.einsum("bhnd,bhntd->bhnt", q.double(), keys) * scale + weight
    if summary.drift is not None:
        drift, shares_h = summary.drift, q.shape[1] // summary.drift.basis.shape[1]
        origin, curve, slope = (
            torch.take_along_dim(t.double(), member.unflatten(-1, (1,) * (t.ndim - 3)), 2)
            for t in (drift.origin, drift.curve, drift.slope)
        )
        y = q.double() @ drift.basis.double().repeat_interleave(shares_h, 1) - origin
        tail = tail + (y.square() * curve).sum(-1, keepdim=True).clamp(max=MAX_BEND)
        values = values + torch.einsum("bhnr,bhnrd->bhnd", y, slope)[..., None, :]
    tail = tail.masked_fill(group[..., None] < 0, -torch.inf)
    both = torch.cat([logits, tail], -1)
    shares_ = both.softmax(-1).nan_to_num(0)
    out = shares_[..., : k.shape[2]] @ v + torch.einsum("bhnt,bhntd->bhnd", shares_[..., k.shape[2] :], values)
    return out, both.logsumexp(-1)


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 4e-3


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted.double(), atol=tolerance(dtype), rtol=tolerance(dtype))

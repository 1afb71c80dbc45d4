"""Random routes through `execution.run`: sound ones agree with the reference, others raise RouteError."""

import dataclasses
import random

import pytest
import torch

from residua import Partition, Route, RouteError, SummaryKeys
from residua.api import attend_route
from residua.types import Drift
from tests.support.oracle import normal, qkv, random_route, worst
from tests.support.sampling import first_is_quick

BACKENDS = ("auto", "torch", "reference")
WRONG = (-(1 << 62), -7, -2, -1, 0, 1, 5, 90, 111, 1 << 31, 1 << 62)


def made(seed: int):
    r = random.Random(seed)
    batch, kv_heads, shares = r.choice((1, 2)), r.choice((1, 2)), r.choice((1, 2))
    heads = kv_heads * shares
    q, k, v = qkv(batch, heads, kv_heads, 90, 110, dim=r.choice((8, 17)), seed=seed)
    cq, ck, rank, slots = r.choice((1, 5)), r.choice((1, 7)), r.choice((1, 4, 8)), r.choice((1, 3, 70))
    route = random_route(batch, heads, kv_heads, cq=cq, ck=ck, keep=r.random(), seed=seed, lowest=r.choice((-1, 0)))
    if r.random() < 0.4:
        return r, q, k, v, route, None
    dim = q.shape[-1]
    drift = Drift(
        normal(batch, kv_heads, dim, rank, seed=seed),
        normal(batch, heads, cq, rank),
        normal(batch, heads, cq, rank).square(),
        normal(batch, heads, cq, rank, dim),
    )
    summary = SummaryKeys(
        normal(batch, heads, cq, slots, dim),
        normal(batch, heads, cq, slots, dim),
        normal(batch, heads, cq, slots),
        drift if r.random() < 0.6 else None,
    )
    return r, q, k, v, route, summary


def spoiled(r: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is nearly right: other values, shape, dtype, device or strides."""
    kind = r.randrange(6)
    if kind == 0 and tensor.dtype == torch.long and tensor.numel():
        bad = tensor.clone()
        for _ in range(r.choice((1, 3))):
            bad.view(-1)[r.randrange(bad.numel())] = r.choice(WRONG)
        return bad
    if kind == 1:
        return tensor[..., : r.randrange(tensor.shape[-1] + 1)]
    if kind == 2:
        return torch.cat([tensor, tensor], r.randrange(tensor.ndim))
    if kind == 3:
        return tensor.to(r.choice((torch.int32, torch.int8, torch.float64, torch.bool)))
    if kind == 4:
        return tensor.flatten() if r.random() < 0.5 else tensor[None]
    return tensor.to("meta")


@pytest.mark.parametrize("part", first_is_quick(range(8)))
def test_sound_routes(part):
    for seed in range(part, 120, 8):
        _, q, k, v, route, summary = made(seed)
        wanted = attend_route(q.double(), k.double(), v.double(), route, backend="reference", summary=summary)
        for backend in BACKENDS:
            out, lse = attend_route(q, k, v, route, backend=backend, summary=summary)
            assert worst(out, wanted[0]) < 1e-4, f"seed {seed}, {backend}"
            assert torch.equal(lse == -torch.inf, wanted[1] == -torch.inf), f"seed {seed}, {backend}"


@pytest.mark.parametrize("part", first_is_quick(range(8)))
def test_corrupt_routes_are_refused_or_harmless(part):
    """What is changed may happen to be sound still; then it runs. Nothing else may be raised."""
    refused = 0
    for seed in range(part, 800, 8):
        r, q, k, v, route, summary = made(seed)
        target = r.choice(("query", "kv", "cells", "summary", "drift"))
        if target in ("query", "kv"):
            old = getattr(route, target)
            parts = {name: getattr(old, name) for name in ("labels", "order", "offsets")}
            name = r.choice(tuple(parts))
            route = dataclasses.replace(route, **{target: Partition(**{**parts, name: spoiled(r, parts[name])})})
        elif target == "cells" or summary is None or (target == "drift" and summary.drift is None):
            route = Route(route.query, route.kv, spoiled(r, route.cells))
        elif target == "summary":
            name = r.choice(("keys", "values", "log_weight"))
            summary = dataclasses.replace(summary, **{name: spoiled(r, getattr(summary, name))})
        else:
            name = r.choice(("basis", "origin", "curve", "slope"))
            drift = dataclasses.replace(summary.drift, **{name: spoiled(r, getattr(summary.drift, name))})
            summary = dataclasses.replace(summary, drift=drift)
        try:
            out, _ = attend_route(q, k, v, route, backend=r.choice(BACKENDS), summary=summary)
            assert out.shape == q.shape
        except RouteError:
            refused += 1
    assert refused > 60

"""Random calls of `residua.attention`, each a function of its seed alone: shapes, dtypes, strides, masks,
pinned ranges, every setting and reconstruction, hostile values."""

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residua import Config
from residua.ops.native import library

LENGTHS = (1, 2, 3, 7, 31, 63, 64, 65, 97, 130)
LONGER = (200, 257, 333, 511, 888, 1200, 2100)
DIMS = (8, 8, 9, 16, 16, 17, 24, 33, 64, 96, 128, 256)
VALUE_DIMS = (8, 13, 16, 17, 64, 96)
LAYOUTS = ("plain", "heads inside", "fused", "strided", "misaligned", "expanded heads", "expanded batch")
FILLS = (
    "normal", "normal", "normal", "clusters", "clusters", "equal", "zero", "spikes", "hot", "tiny",
    "huge", "extreme", "nan", "inf", "infinities",
)  # fmt: skip
MASKS = (None, None, None, "random", "random", "end", "one left", "entry empty")


@dataclass(frozen=True)
class Case:
    """One call. Tensors are made on demand, so that a check can make them again, or others like them."""

    seed: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    layout: str
    fill: str
    where: str  # which tensors hold hostile values
    mask: str | None
    scale: float | None
    pinned: list[tuple[int, int]]
    exact: list[tuple[int, int]]
    steps: int  # calls that share a state; 1: no state
    isa: str | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return Config(**self.settings)

    @property
    def finite(self) -> bool:
        return self.fill not in ("nan", "inf", "infinities")

    def tensors(self, step: int = 0, hidden: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of one step, in the case's layout; masked keys and values hold `hidden` if given."""
        g = torch.Generator().manual_seed(self.seed * 16 + step)
        shapes = {
            "q": (self.batch, self.heads, self.queries, self.dim),
            "k": (self.batch, self.kv_heads, self.keys, self.dim),
            "v": (self.batch, self.kv_heads, self.keys, self.value_dim),
        }
        made = {
            name: filled(shape, self.fill if name in self.where else "normal", self.dtype, g)
            for name, shape in shapes.items()
        }
        if hidden is not None:
            masked = ~self.key_mask()[:, None, :, None]
            made |= {name: made[name].masked_fill(masked, hidden) for name in "kv"}
        return tuple(laid_out(made[name], self.layout, name) for name in "qkv")  # type: ignore[return-value]

    def key_mask(self) -> Tensor | None:
        if self.mask is None:
            return None
        g = torch.Generator().manual_seed(self.seed)
        mask = torch.ones(self.batch, self.keys, dtype=torch.bool)
        if self.mask == "random":
            mask = torch.rand(self.batch, self.keys, generator=g, dtype=torch.float64) < 0.6
        elif self.mask == "end":
            mask[:, self.keys - self.keys // 3 :] = False
        elif self.mask == "one left":
            mask[0] = False
            mask[0, self.keys // 2] = True
        else:
            mask[-1] = False
        return mask

    def arguments(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "scale": self.scale,
            "pinned_keys": self.pinned or None,
            "exact_queries": self.exact or None,
            "key_mask": self.key_mask(),
        }

    def __str__(self) -> str:
        told = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ", ".join(f"{name}={value}" for name, value in told.items() if value not in (None, []))


def make(seed: int, *, small: bool = True) -> Case:
    """The case of a seed; `small` ones take some milliseconds."""
    r = random.Random(seed)
    lengths = LENGTHS if small else LENGTHS + LONGER
    queries = r.choice(lengths)
    keys = queries if r.random() < 0.6 else r.choice(lengths)
    kv_heads, shares = r.choice((1, 1, 2)), r.choice((1, 1, 2, 3))
    backend = r.choice(("auto", "auto", "native", "torch", "torch"))
    if library.load().missing and backend == "native":
        backend = "torch"
    dim = r.choice(DIMS if backend != "torch" else (1, 2, *DIMS))
    dtype = r.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    if backend == "torch" and r.random() < 0.2:
        dtype = torch.float64
    settings = {**draw_settings(r, queries, keys), "backend": backend}
    native = backend != "torch" and not library.load().missing
    stateful = settings.get("max_error") is not None or settings.get("balance") or r.random() < 0.15
    return Case(
        seed=seed,
        batch=r.choice((1, 1, 2, 3)),
        heads=kv_heads * shares,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        dim=dim,
        value_dim=dim if r.random() < 0.6 else r.choice(VALUE_DIMS),
        dtype=dtype,
        layout=r.choice(LAYOUTS) if r.random() < 0.5 else "plain",
        fill=r.choice(FILLS),
        where=r.choice(("q", "k", "v", "qk", "qkv", "qkv")),
        mask=r.choice(MASKS),
        scale=r.choice((None,) * 6 + (0.0, -0.3, 1.0, 1e-4, 30.0)),
        pinned=draw_ranges(r, keys),
        exact=draw_ranges(r, queries),
        steps=r.choice((2, 3)) if stateful else 1,
        isa=r.choice(library.load().isas) if native and r.random() < 0.5 else None,
        settings=settings,
    )


def draw_settings(r: random.Random, queries: int, keys: int) -> dict[str, Any]:
    def maybe(*values: Any, chance: float = 0.5, default: Any = None) -> Any:
        return r.choice(values) if r.random() < chance else default

    name = r.choice(("anchored", "anchored", "tail", "tail", "probe", "none"))
    summarises = name in ("anchored", "tail")
    probes = r.choice((0, 1, 3, 16, 16, 64))
    found: dict[str, Any] = {
        "density": r.choice((0.001, 0.05, 0.22, 0.3, 0.5, 0.9, 1.0)),
        "reconstruction": name,
        "probes": probes,
        "query_groups": maybe(1, 2, 8, 16, max(1, queries), 5000),
        "kv_groups": maybe(1, 3, 16, 64, max(1, keys), 5000),
        "kmeans_cold": r.choice((1, 3, 5)),
        "kmeans_warm": r.choice((1, 2)),
        "key_rank": r.choice((1, 8, 48, 300)),
        "query_rank": r.choice((1, 8, 64)),
        "metric_rows": r.choice((1, 64, 2048)),
        "partition": r.choice(("response", "response", "key-response", "semantic")),
        "score": r.choice(("mass", "mass", "centroid")),
        "probe_policy": maybe("stratified", "random", "uniform", "scattered", chance=0.3),
        "residual_rank": r.choice((1, 4, 16, 300)),
        "ridge": r.choice((0.0, 0.1, 10.0)),
        "subspace": r.random() < 0.8,
        "summary_slots": maybe(1, 2, 3, 8, 64, 1000),
        "drift_rank": r.choice((0, 1, 2, 16, 300)),
    }
    if summarises and probes and r.random() < 0.25:
        found[r.choice(("max_error", "balance"))] = True
        found["probe_policy"] = None
        if "max_error" in found:
            found["max_error"] = r.choice((0.001, 0.1, 1.0))
    return found


def draw_ranges(r: random.Random, total: int) -> list[tuple[int, int]]:
    if r.random() < 0.7:
        return []
    if r.random() < 0.1:
        return [(0, total)]
    edges = sorted(r.randrange(total + 1) for _ in range(2 * r.choice((1, 1, 2))))
    return [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]


def filled(shape: tuple[int, ...], fill: str, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Values of one kind, in fp64 first."""
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    most = torch.finfo(dtype).max
    if fill == "clusters":
        spots = torch.randn(6, shape[-1], generator=g, dtype=torch.float64)
        x = 0.3 * x + 3 * spots[torch.randint(0, 6, shape[:-1], generator=g)]
    elif fill == "equal":
        x = x[..., :1, :].expand(shape).clone()
    elif fill == "zero":
        x = torch.zeros_like(x)
    elif fill == "spikes":
        x = torch.where(torch.rand(shape, generator=g, dtype=torch.float64) < 0.02, 300 * x, x)
    elif fill == "hot":
        x = 40 * x
    elif fill == "tiny":
        x = x * torch.finfo(dtype).tiny
    elif fill == "huge":
        x = (x * math.sqrt(most) / 8).clamp(-most, most)
    elif fill == "extreme":
        x = (x * most / 8).clamp(-most, most)
    x = x.to(dtype)
    bad = {"nan": [math.nan], "inf": [math.inf], "infinities": [math.inf, -math.inf, math.nan]}.get(fill, [])
    for value in bad:
        for _ in range(2):
            if x.numel():
                x.view(-1)[int(torch.randint(0, x.numel(), (1,), generator=g))] = value
    return x


def laid_out(x: Tensor, layout: str, name: str) -> Tensor:
    """The same values behind other strides (expanded ones repeat those of the first head or entry)."""
    batch, heads, rows, dim = x.shape
    if layout == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        return torch.cat([x, -x, x], -1)[..., :dim]
    if layout == "strided":
        return torch.stack([x, -x], -1)[..., 0]
    if layout == "misaligned":
        flat = torch.empty(x.numel() + 3, dtype=x.dtype)
        flat[3:] = x.flatten()
        return flat[3:].view(x.shape)
    if layout == "expanded heads":
        return x[:, :1].expand(batch, heads, rows, dim)
    if layout == "expanded batch":
        return x[:1].expand(batch, heads, rows, dim)
    return x

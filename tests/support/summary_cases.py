"""Random arguments for the primitives that summarise skipped keys: drifting summary keys, slots, mixtures."""

import torch
from torch import Tensor

from residua.ops.backend import Backend
from residua.types import MAX_BEND, Drift, Partition, Route, SummaryKeys

BASE = Backend()

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = [(8, 20), (20, 8), (64, 96), (96, 64), (128, 128)]
SCALE = 0.2
OFF = 4  # the query group whose summary keys are all switched off
BARE = 2  # the query group that keeps no cell


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chance(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def partition(seed: int, heads: int, tokens: int, groups: int, loose: float = 0.1) -> Partition:
    """Ragged groups; the last one is empty, and a share `loose` of the tokens belongs to none."""
    labels = (chance(seed, 1, heads, tokens).square() * (groups - 1)).long()
    labels[chance(seed + 1, *labels.shape) < loose] = -1
    return Partition.from_labels(labels, groups)


def drifting(
    dim: int, value_dim: int, dtype: torch.dtype = torch.float32, *, tokens: int = 257, count: int = 5, rank: int = 16
) -> tuple[Tensor, Tensor, Tensor, Route, SummaryKeys]:
    """Four heads on two K/V heads, seven query groups; about a third of the summary keys is switched off."""
    heads, kv_heads, cq, ck = 4, 2, 7, 9
    q, k, v = (
        rows(seed, 1, h, tokens, width, dtype=dtype)
        for seed, h, width in ((0, heads, dim), (1, kv_heads, dim), (2, kv_heads, value_dim))
    )
    cells = chance(3, 1, heads, cq, ck) < 0.4
    cells[:, :, BARE] = False
    weight = rows(4, 1, heads, cq, count) + 2
    weight[chance(5, *weight.shape) < 0.3] = -torch.inf
    weight[:, :, BARE, 0] = 1.0
    weight[:, :, OFF] = -torch.inf
    drift = Drift(
        rows(6, 1, kv_heads, dim, rank) / dim**0.5,
        rows(7, 1, heads, cq, rank),
        rows(8, 1, heads, cq, rank).abs() / (2 * rank) * MAX_BEND,
        rows(9, 1, heads, cq, rank, value_dim) / rank**0.5,
    )
    route = Route(partition(10, heads, tokens, cq), partition(12, kv_heads, tokens, ck), cells)
    keys, values = rows(14, 1, heads, cq, count, dim), rows(15, 1, heads, cq, count, value_dim)
    return q, k, v, route, SummaryKeys(keys, values, weight, drift)


def slotted(
    dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int = 700,
    cq: int = 13,
    groups: int = 10,
    count: int = 4,
) -> tuple[Tensor, Tensor, Tensor, Partition, Tensor, Tensor]:
    """Arguments of `slot_means`, without the scale. Every anchor has cells of no slot, the last one nothing
    else; slot 0 is empty."""
    heads, kv_heads = 4, 2
    k = rows(0, 1, kv_heads, tokens, dim, dtype=dtype)
    v = rows(1, 1, kv_heads, tokens, value_dim, dtype=dtype)
    anchors, kv = rows(2, 1, heads, cq, dim), partition(3, kv_heads, tokens, groups)
    slots = (chance(5, 1, heads, cq, groups) * (count + 1)).int() - 1
    slots[slots == 0] = -1
    slots[:, :, -1] = -1
    mass = BASE.cell_mass(anchors, k, kv, SCALE)
    log_mass = [torch.where(slots == t, mass, -torch.inf).logsumexp(-1) for t in range(count)]
    return anchors, k, v, kv, slots, torch.stack(log_mass, -1)


def mixture(
    k: Tensor, v: Tensor, kv: Partition, rank: int, count: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Partition, Tensor]:
    """Arguments of `mixed_covariance`; every group for itself unless a count of mixtures is given."""
    batch, heads, _, dim = k.shape
    share = torch.eye(kv.groups).expand(batch, heads, -1, -1)
    if count is not None:
        share = rows(11, batch, heads, count, kv.groups).softmax(-1)
    return share, k, rows(12, batch, heads, dim, rank), v, kv, BASE.group_means(k.float(), kv)


def choices(
    *, groups: int = 30, single: int = 6, merged: int = 4
) -> tuple[Tensor, Tensor, Partition, Partition, Tensor, int, int, Tensor]:
    """Arguments of `choose_slots`: ties, empty groups, no rows in a query group, an unwanted head."""
    mass, cells = 4 * rows(0, 2, 4, 9, groups), chance(1, 2, 4, 9, groups) < 0.3
    mass[0, 0, 1, :20] = 1.5  # ties: the first ones win
    mass[0, 1, 2] -= 200.0
    if groups > single:  # else groups of no mass may be numbered in any order
        mass[1, 2, 3, :5] = -torch.inf
    cells[1, 0, 4] = True
    query = Partition.from_labels((chance(2, 2, 4, 80) * 8).long(), 9)
    kv = Partition.from_labels((chance(3, 2, 2, 200) * (groups - 1)).long(), groups)
    near = (chance(4, 2, 2, groups) * max(1, merged)).long()
    wanted = torch.ones(2, 4, dtype=torch.bool)
    wanted[1, 3] = False
    return mass, cells, query, kv, near, single, merged, wanted

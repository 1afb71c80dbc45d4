"""What the compile gate launches: every primitive of the Triton backend, at the sizes of real models.

The tensors are on the `meta` device: they have shapes, strides and dtypes, and no memory. The launchers
therefore choose the tiles and specialisations that they choose on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from residua.ops.triton.backend import TritonBackend
from residua.types import Drift, Partition, Route, SummaryKeys

TOKENS, HEADS, QUERY_GROUPS, KV_GROUPS, PROBES, RANK = 75600, 40, 300, 1000, 64, 16
SUMMARY_KEYS, SLOTS = 65, 128
HEAD_DIMS = (64, 72, 80, 96, 128)  # of the models that are known, in bf16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


@dataclass(frozen=True)
class Case:
    label: str
    launch: Callable[[TritonBackend], object]

    @property
    def everyday(self) -> bool:
        """Whether a default call of the most common kind launches it: head dim 128, bf16, `anchored`."""
        name = getattr(self.launch, "func", self.launch).__name__
        if name in ("_attend", "_rows", "_split"):
            return self.label in ("D=128 bf16, drift", "D=128 bf16, key mask", "D=128 bf16, kept keys")
        common = ("D=128 bf16", "D=128 bf16, rank 64", f"D=128 bf16, rank {RANK}", "rank 48")
        return self.label in common or ("=" not in self.label and "rank" not in self.label)


def cases() -> list[Case]:
    """Head dims and dtypes that change the code; what only changes a loop count appears once."""
    found = [
        Case("sorting and spending", _order),
        Case("second moments, leading spaces", _spaces),
        Case("neighbourhoods", _neighbourhoods),
        Case("D=128 bf16", partial(_spoil, 128, BF16)),
    ]
    ranks = [(dim, BF16, 48 if dim <= 80 else 64) for dim in HEAD_DIMS]
    for dim, dtype, rank in (*ranks, (128, FP32, 64), (256, FP16, 128)):
        found.append(Case(f"D={dim} {SHORT[dtype]}, rank {rank}", partial(_project, dim, dtype, rank)))
    for rank, masked in ((48, False), (64, True), (256, False)):
        found.append(Case(f"rank {rank}{', masked' if masked else ''}", partial(_kmeans, rank, masked)))
    everywhere = [(dim, BF16) for dim in HEAD_DIMS]
    for dim, dtype in (*everywhere, (256, FP32)):
        found.append(Case(f"D={dim} {SHORT[dtype]}", partial(_move, dim, dtype)))
    for dim, dtype in (*everywhere, (128, FP16), (256, BF16), (128, FP32), (256, FP32)):
        label = f"D={dim} {SHORT[dtype]}"
        found.append(Case(label, partial(_mass, dim, dtype)))
        found.append(Case(label, partial(_slots, dim, dtype)))
        found.append(Case(f"{label}, rank {RANK}", partial(_covariance, dim, dtype)))
        found.append(Case(label, partial(_judge, dim, dtype)))
    for dim, dtype in (*everywhere, (128, FP32)):
        found.append(Case(f"D={dim} to {SHORT[dtype]}", partial(_correct, dim, dtype)))
    for dtype, dims in ((BF16, (*HEAD_DIMS, 256)), (FP16, (128,)), (FP32, (64, 128, 256))):
        for dim in dims:
            label = f"D={dim} {SHORT[dtype]}"
            # what is not a power of two is padded the same way: the largest kernel stands for all
            for kind in (", drift",) if dim in (72, 80) else ("", ", summary", ", drift"):
                found.append(Case(label + kind, partial(_attend, dim, dtype, kind)))
            found.append(Case(f"{label}, key mask", partial(_rows, dim, dtype)))
            found.append(Case(f"{label}, kept keys", partial(_split, dim, dtype)))
    return found


def empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tokens(dim: int, dtype: torch.dtype) -> Tensor:
    """[B, H, N, D] as a model gives it: a transposed view of [B, N, H, D]."""
    return empty(1, TOKENS, HEADS, dim, dtype=dtype).transpose(1, 2)


def partition(groups: int) -> Partition:
    tokens_ = empty(1, HEADS, TOKENS, dtype=torch.long)
    return Partition(tokens_, tokens_, empty(1, HEADS, groups + 1, dtype=torch.long))


def route() -> Route:
    cells = empty(1, HEADS, QUERY_GROUPS, KV_GROUPS, dtype=torch.bool)
    return Route(partition(QUERY_GROUPS), partition(KV_GROUPS), cells)


def _project(dim: int, dtype: torch.dtype, rank: int, backend: TritonBackend) -> None:
    backend.project(tokens(dim, dtype), empty(1, HEADS, dim, rank), True)
    backend.project(tokens(dim, dtype), empty(1, HEADS, dim, rank), True, rough=True)


def _kmeans(rank: int, masked: bool, backend: TritonBackend) -> None:
    valid = empty(HEADS, TOKENS, dtype=torch.bool) if masked else None
    for dtype in (FP32, FP16):
        backend.lloyd(empty(HEADS, TOKENS, rank, dtype=dtype), empty(HEADS, KV_GROUPS, rank), 1, valid)


def _move(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    from residua.ops.triton.join import join_rows
    from residua.ops.triton.permute import gather_noting

    order = partition(KV_GROUPS).order
    backend.group_means(tokens(dim, dtype), partition(KV_GROUPS))
    backend.group_priority(tokens(dim, dtype), tokens(dim, dtype), partition(KV_GROUPS), 4)
    with backend.session() as bound:
        bound.group_means(tokens(dim, dtype), partition(KV_GROUPS), keep=True)
    gather_noting(tokens(dim, dtype), order, partition(KV_GROUPS).offsets, dim)
    backend.gather_rows(tokens(dim, dtype), order)
    x, lse = empty(HEADS, TOKENS, dim, dtype=dtype), empty(HEADS, TOKENS)
    join_rows(x, lse, x, lse, order[0])


def _mass(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    anchors = empty(1, HEADS, QUERY_GROUPS, dim)
    backend.cell_mass(anchors, tokens(dim, dtype), partition(KV_GROUPS), 0.1)


def _slots(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    anchors, x = empty(1, HEADS, QUERY_GROUPS, dim), tokens(dim, dtype)
    slots = empty(1, HEADS, QUERY_GROUPS, KV_GROUPS, dtype=torch.int32)
    mass, near = empty(1, HEADS, QUERY_GROUPS, SLOTS), empty(1, HEADS, KV_GROUPS, dtype=torch.long)
    backend.slot_summary(anchors, x, x, partition(KV_GROUPS), slots, mass, 0.1, near, SLOTS // 2)


def _order(backend: TritonBackend) -> None:
    rows, keys = (empty(1, HEADS, n, dtype=torch.long) for n in (QUERY_GROUPS, KV_GROUPS))
    budgets = [empty(1, HEADS, dtype=torch.long)] * 2
    mass = empty(1, HEADS, QUERY_GROUPS, KV_GROUPS)
    backend.best_cells(mass, rows, keys, budgets, shares=True)
    backend.best_cells(mass, rows, keys, budgets, KV_GROUPS - 1)
    backend.best_cells(mass, rows, keys, budgets, KV_GROUPS, empty(1, HEADS, KV_GROUPS), 1)
    backend.missed_mass(mass, torch.stack([route().cells] * 2))
    backend.sort_groups(empty(1, HEADS, TOKENS, dtype=torch.long), KV_GROUPS)


def _spaces(backend: TritonBackend) -> None:
    counted = empty(1, HEADS, 512, dtype=torch.bool)
    backend.second_moment(empty(1, HEADS, 2048, 128, dtype=BF16), None, False)
    backend.second_moment(empty(1, HEADS, 512, 128), counted, True)
    backend.leading_factor(empty(1, HEADS, 128, 128), 64, exact=False)
    backend._leading_basis(empty(1, HEADS, 128, 128), RANK)


def _neighbourhoods(backend: TritonBackend) -> None:
    mass, near = empty(1, HEADS, QUERY_GROUPS, KV_GROUPS), empty(1, HEADS, KV_GROUPS, dtype=torch.long)
    query, kv, wanted = partition(QUERY_GROUPS), partition(KV_GROUPS), empty(1, HEADS, dtype=torch.bool)
    backend.choose_slots(mass, route().cells, query, kv, near, SLOTS // 2, SLOTS // 2, wanted)
    backend.lloyd(empty(HEADS, KV_GROUPS, 128), empty(HEADS, 64, 128), 8, None, means=False)


def _spoil(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    backend.spoil(empty(1, HEADS, TOKENS, dim, dtype=dtype), empty(1, HEADS, 1, dim, dtype=torch.bool))
    backend.lost_channels(tokens(dim, dtype), empty(1, TOKENS, dtype=torch.bool))


def _covariance(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    kv = partition(KV_GROUPS)
    share, centroids = empty(1, HEADS, QUERY_GROUPS, KV_GROUPS), empty(1, HEADS, KV_GROUPS, dim)
    factor = empty(1, HEADS, dim, RANK)
    x = tokens(dim, dtype)
    backend.skipped_covariance(share, x, factor, x, kv, centroids)
    merged, near = empty(1, HEADS, QUERY_GROUPS, SLOTS // 2), empty(1, HEADS, KV_GROUPS, dtype=torch.long)
    given = (share, x, factor, tokens(dim, dtype), kv, centroids, merged, near)
    backend.skipped_covariance(*given)
    with backend.session() as bound:  # there the values are sorted on the way
        bound.skipped_covariance(*given)


def _summary(dim: int, dtype: torch.dtype, drifts: bool) -> SummaryKeys:
    groups = (1, HEADS, QUERY_GROUPS)
    slope = empty(*groups, RANK, dim, dtype=FP32 if dtype == FP32 else BF16)
    drift = Drift(empty(1, HEADS, dim, RANK), empty(*groups, RANK), empty(*groups, RANK), slope)
    # with a drift keys and values come as the slots' kernel writes them, without one as centroids in fp32
    room, own = ((*groups, SLOTS), dtype) if drifts else ((*groups, SUMMARY_KEYS), FP32)
    keys, values = empty(*room, dim, dtype=own), empty(*room, dim, dtype=own)
    return SummaryKeys(keys, values, empty(*room), drift if drifts else None)


def _attend(dim: int, dtype: torch.dtype, kind: str, backend: TritonBackend) -> None:
    x = tokens(dim, dtype)
    summary = _summary(dim, dtype, "drift" in kind) if kind else None
    backend.attend(x, x, x, route(), 0.1, summary, FP32)


def _rows(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    x = tokens(dim, dtype)
    mask = empty(1, TOKENS, dtype=torch.bool)
    for count in (PROBES, 4 * PROBES):
        backend.attend_rows(empty(1, HEADS, count, dim, dtype=dtype), x, x, mask, 0.1)


def _split(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    x, mask = tokens(dim, dtype), empty(1, TOKENS, dtype=torch.bool)
    kept = empty(1, HEADS, PROBES, KV_GROUPS, dtype=torch.bool)
    backend.split_rows(empty(1, HEADS, PROBES, dim, dtype=dtype), x, x, partition(KV_GROUPS), kept, mask, 0.1)


def _judge(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    rows, group = empty(1, HEADS, PROBES, dim, dtype=dtype), empty(1, HEADS, PROBES, dtype=torch.long)
    exact, lse = empty(1, HEADS, PROBES, dim), empty(1, HEADS, PROBES)
    summary = _summary(dim, dtype, drifts=True)
    errors = backend.candidate_errors(rows, group, exact, (exact, lse), (exact, lse), summary.drift)
    without = empty(1, HEADS, dtype=torch.bool)
    choice, _ = backend.best_candidate(errors, lse, without, 0.9)
    backend.switch_summary(summary, choice)


def _correct(dim: int, dtype: torch.dtype, backend: TritonBackend) -> None:
    left, right = empty(1, HEADS, dim, RANK), empty(1, HEADS, RANK, dim)
    backend.add_affine(empty(1, HEADS, TOKENS, dim), left, right, empty(1, HEADS, dim), dtype)

"""Tests whether a backend computes correctly on this machine: its primitives against plain torch on the CPU,
where neither TF32 nor what else is switched on for the GPU changes a result.

`residua doctor --self-test` runs all of it. The smallest part runs automatically when a GPU is first used,
and the result is stored per GPU and version. A backend that failed is not chosen, with a reason.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..types import Drift, Partition, Route, SummaryKeys
from .backend import Backend
from .gpu_cache import gpu_key, recall, remember
from .reference import Reference

Shape = tuple[int, int, int, int, int]  # heads, K/V heads, queries, keys, head dim
# small, of odd sizes, with grouped-query attention
SHAPES: tuple[Shape, ...] = ((2, 2, 257, 515, 64), (4, 2, 1025, 777, 128), (2, 1, 300, 640, 96))
SMALLEST = ((2, 1, 257, 515, 128),)
DTYPES = (torch.bfloat16, torch.float16)
LIMIT = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative to the largest value
COVARIANCE = LIMIT[torch.bfloat16]  # kept in bf16 whenever keys have 16 bits
EXACT = 1e-4  # for results in fp32 from any input
AGREE = 0.995  # share of rows that must be in the same group
NO_MEMORY = "out of memory"  # says nothing about the backend
_LOCK = threading.Lock()
_VERDICTS: dict[str, str | None] = {}  # of this process, because the cache may not be writable


@dataclass(frozen=True)
class Check:
    """One primitive at one shape and dtype."""

    kernel: str
    shape: str
    dtype: str
    error: float  # relative to the largest value, or the share of rows that differ
    limit: float
    problem: str = ""  # what was raised, if anything

    @property
    def passed(self) -> bool:
        return not self.problem and self.error <= self.limit  # NaN fails


def _whole(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Case:
    """A primitive, with what it is given. What it changes in place is its own."""

    name: str  # of the primitive; behind a comma, what is special
    limit: float
    given: tuple[Any, ...]
    wide: bool = False  # whether what it is measured by computes in fp64
    part: Callable[[Any], Any] = _whole  # what of the results is compared

    def error(self, backend: Backend, trusted: _OnTheCpu) -> float:
        method = self.name.partition(",")[0]
        given = _each(self.given, lambda x: x.double() if self.wide and x.is_floating_point() else x)
        wanted = getattr(trusted, method)(*given)
        return _off(self.part(getattr(backend, method)(*self.given)), self.part(wanted))


def run_self_test(
    backend: Backend, device: torch.device, shapes: Sequence[Shape] = SHAPES, dtypes: Sequence[torch.dtype] = DTYPES
) -> list[Check]:
    """Tests every primitive of the backend at every shape and dtype. Never raises: a failure is a result."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        return [check for shape in shapes for dtype in dtypes for check in _checks(backend, device, shape, dtype)]


def _checks(backend: Backend, device: torch.device, shape: Shape, dtype: torch.dtype) -> Iterator[Check]:
    facts = "x".join(map(str, shape)), str(dtype).removeprefix("torch.")
    trusted = _OnTheCpu(Reference(), device)
    for make in (_cases, _stage_cases):
        try:
            for case in make(trusted, device, shape, dtype):
                try:
                    yield Check(case.name, *facts, case.error(backend, trusted), case.limit)
                except Exception as error:  # a broken kernel may raise anything, which is a failed check
                    yield Check(case.name, *facts, float("nan"), case.limit, _problem(error))
        except Exception as error:  # a kernel has broken the device: not even inputs can be made any more
            yield Check("its inputs", *facts, float("nan"), 0.0, _problem(error))


def _problem(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return NO_MEMORY
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def first_use(backend: Backend, device: torch.device) -> str | None:
    """Runs the smallest part once per GPU and version; returns the reason if the backend failed, now or earlier.

    `RESIDUA_SELF_TEST=0` switches it off. While a CUDA graph is captured nothing can be tested: the next call will.
    """
    if os.environ.get("RESIDUA_SELF_TEST") == "0":
        return None
    known = recall(device)
    if backend.name in known.get("failed", {}):
        return str(known["failed"][backend.name])
    if backend.name in known.get("passed", []):
        return None
    with _LOCK:
        key = f"{backend.name} {gpu_key(device)}"
        if key in _VERDICTS:
            return _VERDICTS[key]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        checks = run_self_test(backend, device, SMALLEST, (torch.bfloat16,))
        reason = record(backend, device, checks)
        if reason is not None or all(check.passed for check in checks):
            _VERDICTS[key] = reason
        return reason


def record(backend: Backend, device: torch.device, checks: Sequence[Check]) -> str | None:
    """Stores the result; returns the reason against the backend, or None. Checks that ran out of memory are
    no reason, and then nothing is stored."""
    bad = [check for check in checks if not check.passed and check.problem != NO_MEMORY]
    if not bad and not all(check.passed for check in checks):
        return None
    known = recall(device)
    failed = {name: reason for name, reason in known.get("failed", {}).items() if name != backend.name}
    passed = [name for name in known.get("passed", []) if name != backend.name]
    if bad:
        what = bad[0].problem or f"off by {bad[0].error:.2g}, allowed {bad[0].limit:.2g}"
        failed[backend.name] = (
            f"failed its self-test on this GPU: {bad[0].kernel} ({bad[0].dtype}, {bad[0].shape}): {what}; "
            "`residua doctor --self-test` runs it again"
        )
    else:
        passed.append(backend.name)
    remember(device, failed=failed, passed=passed)
    return failed.get(backend.name)


def _cases(trusted: _OnTheCpu, device: torch.device, shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    """Attention, rows, and what groups are made of."""
    heads, kv_heads, queries, keys, dim = shape
    random, loose = _random(device, 0), LIMIT[dtype]
    q = random(1, queries, heads, dim, to=dtype).transpose(1, 2)
    k, v = (random(1, kv_heads, keys, dim, to=dtype) for _ in range(2))
    cq, ck, rank, scale = 5, 13, 16, dim**-0.5
    query = Partition.from_labels(_labels(random(1, heads, queries), cq), cq)
    kv = Partition.from_labels(_labels(random(1, kv_heads, keys), ck), ck)
    route = Route(query, kv, random(1, heads, cq, ck) > 0.3)
    anchors, factor = random(1, heads, cq, dim), random(1, heads, dim, 32) / dim**0.5
    drift = Drift(
        random(1, kv_heads, dim, rank) / dim**0.5,
        random(1, heads, cq, rank),
        random(1, heads, cq, rank).abs() / 32,
        random(1, heads, cq, rank, dim) / 16,
    )
    summary = SummaryKeys(random(1, heads, cq, 19, dim), random(1, heads, cq, 19, dim), random(1, heads, cq, 19))
    drifting = SummaryKeys(summary.keys.to(dtype), summary.values.to(dtype), summary.log_weight, drift)
    yield Case("attend", loose, (q, k, v, route, scale, None, torch.float32), wide=True)
    yield Case("attend, summary", loose, (q, k, v, route, scale, summary, torch.float32), wide=True)
    yield Case("attend, drift", loose, (q, k, v, route, scale, drifting, torch.float32), wide=True)

    rows, kept = q[:, :, :37], random(1, heads, 37, ck) > 0
    yield Case("attend_rows", loose, (rows, k, v, None, scale), wide=True)
    yield Case("split_rows", loose, (rows, k, v, kv, kept, None, scale), wide=True)
    group, exact = query.labels[..., :37].clamp(min=0), random(1, heads, 37, dim)
    sums = [(random(1, heads, 37, dim), random(1, heads, 37)) for _ in range(2)]
    yield Case("candidate_errors", EXACT, (rows, group, exact, sums[0], sums[1], drift))
    errors = trusted.candidate_errors(rows, group, exact, sums[0], sums[1], drift)
    yield Case("best_candidate", EXACT, (errors, random(1, heads, 37).abs(), random(1, heads) > 1, 0.9))
    own = replace(drift, curve=drift.curve.clone(), slope=drift.slope.clone())
    own_summary = replace(drifting, log_weight=summary.log_weight.clone(), drift=own)
    yield Case("switch_summary", 0.0, (own_summary, torch.arange(heads, device=device)[None] % 3))

    yield Case("project", EXACT, (q, factor, True))
    yield Case("gather_rows", 0.0, (k, kv.order))
    yield Case("group_means", EXACT, (k, kv))
    yield Case("cell_mass", EXACT, (anchors, k, kv, scale))
    x, centres = random(heads, queries, 48), random(heads, ck, 48)
    yield Case("lloyd", 1 - AGREE, (x, centres, 1, None), part=itemgetter(0))
    share, sizes = random(1, heads, cq, ck).log_softmax(-1), kv.sizes.repeat_interleave(heads // kv_heads, 1)
    budget = torch.full((1, heads), queries * keys // 4, dtype=torch.long, device=device)
    yield Case("best_cells, shares", 0.0, (share, query.sizes, sizes, [budget], None, None, None, True))


def _stage_cases(trusted: _OnTheCpu, device: torch.device, shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    """The small stages: sorting, moments, slots, cells."""
    heads, kv_heads, queries, keys, dim = shape
    random = _random(device, 1000)
    cq, ck, rank, scale = 5, 29, 16, dim**-0.5
    k, v = (random(1, kv_heads, keys, dim, to=dtype) for _ in range(2))
    query = Partition.from_labels(_labels(random(1, heads, queries), cq), cq)
    kv = Partition.from_labels(_labels(random(1, kv_heads, keys), ck), ck)
    yield Case("sort_groups", 0.0, (kv.labels, ck))
    yield Case("second_moment", EXACT, (k, None, True))
    moment = trusted.second_moment(k, None, False)
    yield Case("leading_factor", 1e-3, (moment, rank, False), part=_square)
    x, centres = random(heads, 90, 64), random(heads, 9, 64)
    yield Case("lloyd, labels", 1 - AGREE, (x, centres, 2, None, False), part=itemgetter(0))
    factor = random(1, kv_heads, dim, rank) / dim**0.5
    yield Case("project, rough", 1e-3, (k, factor, False, True))

    mass, sizes = 3 * random(1, heads, cq, ck), kv.sizes.repeat_interleave(heads // kv_heads, 1)
    budget = torch.full((1, heads), queries * keys // 4, dtype=torch.long, device=device)
    given: tuple[Any, ...] = (mass, query.sizes, sizes, [budget, budget], ck, random(1, heads, ck))
    yield Case("best_cells", 1 - AGREE, (*given, 1))  # one budget by priority, one by mass
    yield Case("group_priority", EXACT, (k, v, kv, 4))
    cells = random(1, 1, heads, cq, ck) > 0.3
    yield Case("missed_mass", EXACT, (mass, cells))

    anchors = random(1, heads, cq, dim)
    near = torch.arange(ck, device=device).remainder(3).expand(1, kv_heads, ck)
    exact_mass = trusted.cell_mass(anchors, k, kv, scale)
    wanted = torch.ones(1, heads, dtype=torch.bool, device=device)
    chosen = (exact_mass, cells[0], query, kv, near, 4, 3, wanted)
    yield Case("choose_slots", EXACT, chosen, part=itemgetter(2))
    slots, log_mass, _ = trusted.choose_slots(*chosen)
    given = (anchors, k, v, kv, slots, log_mass, scale, near, 4)
    yield Case("slot_summary", LIMIT[dtype], given, part=itemgetter(slice(2)))
    share, centroids = random(1, kv_heads, cq, ck).softmax(-1), trusted.group_means(k, kv)
    given = (share, k, factor, v, kv, centroids)
    yield Case("skipped_covariance", COVARIANCE, given)
    yield Case("skipped_covariance, merged", COVARIANCE, (*given, share[..., :3], near, ck - 1, False))

    left, right = random(1, kv_heads, dim, rank) / dim, random(1, kv_heads, rank, dim)
    yield Case("add_affine", LIMIT[dtype], (v.float(), left, right, random(1, kv_heads, dim), dtype))
    holed = v.clone()
    holed[:, :, 7, 3] = torch.nan
    yield Case("lost_channels", 0.0, (holed, None))
    yield Case("spoil", 0.0, (v.clone(), trusted.lost_channels(holed, None)[:, :, None]))


def _off(got: Any, wanted: Any) -> float:
    """Largest error, relative to the largest value; entries that are not finite must be so in both. Of integers the
    share that differs; of what holds tensors, the largest over these."""
    if not isinstance(got, Tensor):
        return max(_off(*pair) for pair in zip(_tensors(got), _tensors(wanted), strict=True))
    if not got.is_floating_point():
        return float((got != wanted).double().mean()) if got.shape == wanted.shape else float("inf")
    got, wanted = got.double(), wanted.double()
    if not torch.equal(torch.isfinite(got), torch.isfinite(wanted)):
        return float("inf")
    fine = torch.isfinite(wanted)
    size = wanted[fine].abs().max().clamp(min=1e-6)
    return float((got[fine] - wanted[fine]).abs().max() / size)


def _square(x: Tensor) -> Tensor:
    """A product that does not depend on a rotation of the columns."""
    return x.double() @ x.double().mT


def _random(device: torch.device, seed: int) -> Callable[..., Tensor]:
    """Makes normal numbers on the CPU, which has the same ones everywhere, and moves them to the device."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def random(*size: int, to: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=generator, device="cpu", dtype=torch.float32).to(device, to)

    return random


class _OnTheCpu:
    """The functions of `source`, computed on the CPU; results go to the device."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self._source, self._device = source, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._source, name)
        return lambda *given: _each(function(*_each(given, Tensor.cpu)), lambda tensor: tensor.to(self._device))


def _tensors(x: Any) -> list[Tensor]:
    """A tensor, or all of what holds some."""
    if isinstance(x, Tensor):
        return [x]
    parts = vars(x).values() if is_dataclass(x) else x if isinstance(x, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or what holds some, with all of them changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, (tuple, list)):
        return [_each(part, change) for part in x]
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{field.name: _each(getattr(x, field.name), change) for field in fields(x)})
    return x


def _labels(draw: Tensor, groups: int) -> Tensor:
    """Groups of very different sizes, one of them empty; some tokens have no group."""
    labels = (draw.abs() * groups / 2).long().clamp(max=groups - 1)
    return torch.where(labels == 2, 0, torch.where(draw > 2.2, -1, labels))

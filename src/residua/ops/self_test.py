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
from typing import Any

import torch
from torch import Tensor

from ..types import Drift, Partition, Route, SummaryKeys
from . import plain as plain_torch
from .backend import Backend
from .gpu_cache import gpu_key, recall, remember
from .reference import Reference

# heads, K/V heads, queries, keys, head dim: small, of odd sizes, with grouped-query attention
SHAPES = ((2, 2, 257, 515, 64), (4, 2, 1025, 777, 128), (2, 1, 300, 640, 96))
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


def run_self_test(
    backend: Backend,
    device: torch.device,
    shapes: Sequence[tuple[int, int, int, int, int]] = SHAPES,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> list[Check]:
    """Tests every primitive of the backend at every shape and dtype. Never raises: a failure is a result."""
    found = []
    no_autocast = torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False)
    with torch.no_grad(), no_autocast[0], no_autocast[1]:
        for shape in shapes:
            for dtype in dtypes:
                for make in (_cases, _stage_cases):
                    found += _run_cases(make, backend, device, shape, dtype)
    return found


def _run_cases(
    make: Callable[..., Iterator[tuple[str, float, Callable[[], float]]]],
    backend: Backend,
    device: torch.device,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
) -> list[Check]:
    found: list[Check] = []
    facts = ("x".join(map(str, shape)), _short(dtype))
    try:
        for name, limit, work in make(backend, device, shape, dtype):
            try:
                found.append(Check(name, *facts, work(), limit))
            except Exception as error:  # a broken kernel may raise anything, which is a failed check
                found.append(Check(name, *facts, float("nan"), limit, _problem(error)))
    except Exception as error:  # a kernel has broken the device: not even inputs can be made any more
        found.append(Check("its inputs", *facts, float("nan"), 0.0, _problem(error)))
    return found


def _problem(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return NO_MEMORY
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def first_use(backend: Backend, device: torch.device) -> str | None:
    """Runs the smallest part once per GPU and version; returns the reason if the backend failed, now or
    earlier.

    `RESIDUA_SELF_TEST=0` switches it off. While a CUDA graph is captured nothing can be tested: the next call
    will.
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
    known = recall(device)
    failed = dict(known.get("failed", {}))
    passed = [name for name in known.get("passed", []) if name != backend.name]
    failed.pop(backend.name, None)
    bad = [check for check in checks if not check.passed and check.problem != NO_MEMORY]
    if not bad and not all(check.passed for check in checks):
        return None
    if bad:
        worst = bad[0]
        what = worst.problem or f"off by {worst.error:.2g}, allowed {worst.limit:.2g}"
        failed[backend.name] = (
            f"failed its self-test on this GPU: {worst.kernel} ({worst.dtype}, {worst.shape}): {what}; "
            "`residua doctor --self-test` runs it again"
        )
    else:
        passed.append(backend.name)
    remember(device, failed=failed, passed=passed)
    return failed.get(backend.name)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _off(got: Tensor, wanted: Tensor) -> float:
    """Largest error, relative to the largest value; entries that are not finite must be so in both."""
    got, wanted = got.double(), wanted.double()
    if not torch.equal(torch.isfinite(got), torch.isfinite(wanted)):
        return float("inf")
    fine = torch.isfinite(wanted)
    size = wanted[fine].abs().max().clamp(min=1e-6)
    return float((got[fine] - wanted[fine]).abs().max() / size)


def _cases(
    backend: Backend, device: torch.device, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Iterator[tuple[str, float, Callable[[], float]]]:
    heads, kv_heads, queries, keys, dim = shape
    random, plain = _random(device, 0), _OnTheCpu(plain_torch, device)
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
    keys_, values = random(1, heads, cq, 19, dim), random(1, heads, cq, 19, dim)
    summary = SummaryKeys(keys_, values, random(1, heads, cq, 19))
    drifting = SummaryKeys(keys_.to(dtype), values.to(dtype), summary.log_weight, drift)
    trusted, loose = _OnTheCpu(Reference(), device), LIMIT[dtype]

    def attend(with_summary: SummaryKeys | None) -> float:
        got, lse = backend.attend(q, k, v, route, scale, with_summary, torch.float32)
        wanted, wanted_lse = trusted.attend(q.double(), k.double(), v.double(), route, scale, with_summary)
        return max(_off(got, wanted), _off(lse, wanted_lse))

    yield "attend", loose, lambda: attend(None)
    yield "attend, summary", loose, lambda: attend(summary)
    yield "attend, drift", loose, lambda: attend(drifting)
    rows, kept = q[:, :, :37], random(1, heads, 37, ck) > 0
    wide_rows, wide_k, wide_v = rows.double(), k.double(), v.double()
    yield (
        "attend_rows",
        loose,
        lambda: _off(
            backend.attend_rows(rows, k, v, None, scale), plain.attend_rows(wide_rows, wide_k, wide_v, None, scale)
        ),
    )
    yield (
        "split_rows",
        loose,
        lambda: max(
            map(
                _off,
                backend.split_rows(rows, k, v, kv, kept, None, scale),
                plain.split_rows(wide_rows, wide_k, wide_v, kv, kept, None, scale),
            )
        ),
    )
    group, exact = query.labels[..., :37].clamp(min=0), random(1, heads, 37, dim)
    sums = [(random(1, heads, 37, dim), random(1, heads, 37)) for _ in range(2)]
    given = (rows, group, exact, sums[0], sums[1], drift)
    errors, weights = trusted.candidate_errors(*given), random(1, heads, 37).abs()
    bare = random(1, heads) > 1
    yield "candidate_errors", EXACT, lambda: _off(backend.candidate_errors(*given), errors)
    yield (
        "best_candidate",
        EXACT,
        lambda: max(
            map(
                _off,
                backend.best_candidate(errors, weights, bare, 0.9),
                trusted.best_candidate(errors, weights, bare, 0.9),
            )
        ),
    )
    yield "switch_summary", 0.0, lambda: _switching(backend, drifting, drift)
    yield "project", EXACT, lambda: _off(backend.project(q, factor, True), plain.project(q, factor, True))
    yield "gather_rows", 0.0, lambda: _off(backend.gather_rows(k, kv.order), plain.gather_rows(k, kv.order))
    yield "group_means", EXACT, lambda: _off(backend.group_means(k, kv), plain.group_means(k, kv))
    yield (
        "cell_mass",
        EXACT,
        lambda: _off(backend.cell_mass(anchors, k, kv, scale), plain.cell_mass(anchors, k, kv, scale)),
    )
    yield (
        "group_covariance",
        1e-3,
        lambda: max(
            map(
                _off,
                backend.group_covariance(k[..., :rank].float(), v, kv),
                plain.group_covariance(k[..., :rank].float(), v, kv),
            )
        ),
    )
    x, centres = random(heads, queries, 48), random(heads, ck, 48)
    yield (
        "kmeans_step",
        1 - AGREE,
        lambda: float(
            (backend.kmeans_step(x, centres, None)[0] != plain.kmeans_step(x, centres, None)[0]).double().mean()
        ),
    )
    share, sizes = random(1, heads, cq, ck).log_softmax(-1), kv.sizes.repeat_interleave(heads // kv_heads, 1)
    budget = torch.full((1, heads), queries * keys // 4, dtype=torch.long, device=device)
    yield (
        "spend",
        0.0,
        lambda: float(
            (backend.spend(share, query.sizes, sizes, budget) != plain.spend(share, query.sizes, sizes, budget))
            .double()
            .mean()
        ),
    )


def _stage_cases(
    backend: Backend, device: torch.device, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """The small stages: sorting, moments, slots, cells. `Backend` itself is plain torch."""
    heads, kv_heads, queries, keys, dim = shape
    random, trusted = _random(device, 1000), _OnTheCpu(Reference(), device)
    cq, ck, rank, scale = 5, 29, 16, dim**-0.5
    k, v = (random(1, kv_heads, keys, dim, to=dtype) for _ in range(2))
    query = Partition.from_labels(_labels(random(1, heads, queries), cq), cq)
    kv = Partition.from_labels(_labels(random(1, kv_heads, keys), ck), ck)
    yield "sort_groups", 0.0, lambda: _differ(backend.sort_groups(kv.labels, ck).order, kv.order)
    yield (
        "second_moment",
        EXACT,
        lambda: _off(backend.second_moment(k, None, True), trusted.second_moment(k, None, True)),
    )
    moment = trusted.second_moment(k, None, False)
    yield (
        "leading_factor",
        1e-3,
        lambda: _off(_square(backend.leading_factor(moment, rank)), _square(trusted.leading_factor(moment, rank))),
    )
    x, centres = random(heads, 90, 64), random(heads, 9, 64)
    yield (
        "lloyd",
        1 - AGREE,
        lambda: _differ(backend.lloyd_labels(x, centres, 2, None), trusted.lloyd_labels(x, centres, 2, None)),
    )
    factor = random(1, kv_heads, dim, rank) / dim**0.5
    yield (
        "coordinates",
        1e-3,
        lambda: _off(backend.coordinates(k, factor, False), trusted.coordinates(k, factor, False)),
    )
    mass, sizes = 3 * random(1, heads, cq, ck), kv.sizes.repeat_interleave(heads // kv_heads, 1)
    budget = torch.full((1, heads), queries * keys // 4, dtype=torch.long, device=device)
    worth = random(1, heads, ck)
    given = (mass, query.sizes, sizes, [budget, budget], ck, worth, 1)  # one by worth, one by mass
    yield "best_cells", 1 - AGREE, lambda: _differ(backend.best_cells(*given), trusted.best_cells(*given))
    yield "group_worth", EXACT, lambda: _off(backend.group_worth(k, v, kv, 4), trusted.group_worth(k, v, kv, 4))
    cells = random(1, 1, heads, cq, ck) > 0.3
    yield "missed_mass", EXACT, lambda: _off(backend.missed_mass(mass, cells), trusted.missed_mass(mass, cells))
    anchors = random(1, heads, cq, dim)
    near = torch.arange(ck, device=device).remainder(3).expand(1, kv_heads, ck)
    exact_mass = trusted.cell_mass(anchors, k, kv, scale)
    wanted = torch.ones(1, heads, dtype=torch.bool, device=device)
    slots = trusted.choose_slots(exact_mass, cells[0], query, kv, near, 4, 3, wanted)
    yield (
        "choose_slots",
        EXACT,
        lambda: _off(backend.choose_slots(exact_mass, cells[0], query, kv, near, 4, 3, wanted)[2], slots[2]),
    )
    yield (
        "slot_summary",
        LIMIT[dtype],
        lambda: max(
            map(
                _off,
                backend.slot_summary(anchors, k, v, kv, slots[0], slots[1], scale, near, 4)[:2],
                trusted.slot_summary(anchors, k, v, kv, slots[0], slots[1], scale, near, 4)[:2],
            )
        ),
    )
    share, centroids = random(1, kv_heads, cq, ck).softmax(-1), trusted.group_means(k, kv)
    yield (
        "mixed_covariance",
        COVARIANCE,
        lambda: max(
            map(
                _off,
                backend.mixed_covariance(share, k, factor, v, kv, centroids),
                trusted.mixed_covariance(share, k, factor, v, kv, centroids),
            )
        ),
    )
    skipped = (share, share[..., :3], k, factor, v, kv, centroids, near, ck - 1, False)
    yield (
        "skipped_covariance",
        COVARIANCE,
        lambda: max(map(_off, backend.skipped_covariance(*skipped), trusted.skipped_covariance(*skipped))),
    )
    left, right = random(1, kv_heads, dim, rank) / dim, random(1, kv_heads, rank, dim)
    bias = random(1, kv_heads, dim)
    yield (
        "add_affine",
        LIMIT[dtype],
        lambda: _off(
            backend.add_affine(v.float(), left, right, bias, dtype),
            trusted.add_affine(v.float(), left, right, bias, dtype),
        ),
    )
    holed = v.clone()
    holed[:, :, 7, 3] = torch.nan
    yield "lost_channels", 0.0, lambda: _differ(backend.lost_channels(holed, None), trusted.lost_channels(holed, None))
    lost = trusted.lost_channels(holed, None)[:, :, None]
    yield "spoil", 0.0, lambda: _differ(backend.spoil(v.clone(), lost).isnan(), lost.expand_as(v))


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
        return lambda *given: _moved(function(*_moved(given, torch.device("cpu"))), self._device)


def _moved(x: Any, device: torch.device) -> Any:
    """A tensor, or what holds some, with all of them on the device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, (tuple, list)):
        return [_moved(part, device) for part in x]
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{field.name: _moved(getattr(x, field.name), device) for field in fields(x)})
    return x


def _differ(got: Tensor, wanted: Tensor) -> float:
    """Share of the entries that differ."""
    return float((got != wanted).double().mean()) if got.shape == wanted.shape else float("inf")


def _square(x: Tensor) -> Tensor:
    """A product that does not depend on a rotation of the columns."""
    return x.double() @ x.double().mT


def _switching(backend: Backend, summary: SummaryKeys, drift: Drift) -> float:
    """How far the summary is off in heads that keep it whole, without drift, and not at all."""
    choice = torch.arange(summary.keys.shape[1], device=summary.keys.device)[None] % 3
    # copies, because a backend may switch in place
    own_drift = Drift(drift.basis, drift.origin, drift.curve.clone(), drift.slope.clone())
    own = SummaryKeys(summary.keys, summary.values, summary.log_weight.clone(), own_drift)
    got, wanted = backend.switch_summary(own, choice), plain_torch.switch_summary(summary, choice)
    assert got.drift is not None and wanted.drift is not None
    return max(
        _off(got.log_weight.exp(), wanted.log_weight.exp()),
        _off(got.drift.curve, wanted.drift.curve),
        _off(got.drift.slope, wanted.drift.slope),
    )


def _labels(draw: Tensor, groups: int) -> Tensor:
    """Groups of very different sizes, one of them empty; some tokens have no group."""
    labels = (draw.abs() * groups / 2).long().clamp(max=groups - 1)
    return torch.where(labels == 2, 0, torch.where(draw > 2.2, -1, labels))

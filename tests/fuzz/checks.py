"""What must hold for every case. Each check returns the promises that it found broken."""

import json
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from residua import State, attention
from residua.ops.backend import Backend
from residua.ops.native import library
from residua.ops.reference import Reference
from residua.ops.select import backends
from tests.fuzz.cases import Case, make
from tests.support.poison import NAN, NUMBERS, poisoned_memory

CASES, PARTS = 2000, 40  # of every test run
SECONDS = 20.0  # of the processor: a case of this size that takes longer is a finding


@contextmanager
def instruction_set(name: str | None):
    before = os.environ.get(library.ISA_VARIABLE)
    if name is not None:
        os.environ[library.ISA_VARIABLE] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop(library.ISA_VARIABLE)
            if before is not None:
                os.environ[library.ISA_VARIABLE] = before


@contextmanager
def default_dtype(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def call(
    case: Case, change=lambda tensors: tensors, hidden: float | None = None, **changed: Any
) -> tuple[list[Tensor], list[Any]]:
    """Outputs and receipts of all steps; `change` alters the tensors of each, `hidden` fills masked keys."""
    state = State() if case.steps > 1 else None
    outs, receipts = [], []
    with instruction_set(case.isa), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(case.steps):
            out, receipt = attention(
                *change(case.tensors(step, hidden)), state=state, return_receipt=True, **{**case.arguments(), **changed}
            )
            outs.append(out)
            receipts.append(receipt)
    return outs, receipts


def dense(case: Case, step: int) -> Tensor:
    """Attention over every key in fp64; rows without any key are 0."""
    q, k, v = (x.double() for x in case.tensors(step))
    shares = case.heads // case.kv_heads
    k, v = k.repeat_interleave(shares, 1), v.repeat_interleave(shares, 1)
    scale = 1 / math.sqrt(case.dim) if case.scale is None else case.scale
    logits = q @ k.mT * scale  # [B, H, Nq, Nk]
    mask = case.key_mask()
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -math.inf)
        v = torch.where(mask[:, None, :, None], v, 0.0)
    out = logits.softmax(-1) @ v
    if mask is not None:
        out[~mask.any(-1)] = 0.0
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN equals NaN."""
    return torch.equal(a.nan_to_num(nan=1.25e4), b.nan_to_num(nan=1.25e4)) and torch.equal(a.isnan(), b.isnan())


def worst(a: Tensor, b: Tensor) -> float:
    both = a.double().nan_to_num(nan=0.0), b.double().nan_to_num(nan=0.0)
    return float((both[0] - both[1]).abs().max()) if a.numel() else 0.0


def check(case: Case, thorough: bool = True) -> list[str]:
    """Everything that is wrong with a case, as one line each."""
    started = time.process_time()
    try:
        outs, receipts = call(case)
    except Exception as error:  # whatever it is, it is a finding
        return [f"raised {type(error).__name__}: {error}"]
    took = time.process_time() - started
    found = [f"took {took:.0f} s"] if took > SECONDS else []
    for step, (out, receipt) in enumerate(zip(outs, receipts, strict=True)):
        found += check_output(case, step, out)
        found += check_receipt(case, step, receipt)
    found += check_repeats(case, outs, thorough)
    found += check_backend(case)
    return found


def check_output(case: Case, step: int, out: Tensor) -> list[str]:
    wanted = [case.batch, case.heads, case.queries, case.value_dim]
    if list(out.shape) != wanted or out.dtype != case.dtype:
        return [f"step {step}: {list(out.shape)} {out.dtype}, wanted {wanted} {case.dtype}"]
    exact = dense(case, step)
    lost, dense_lost = (~x.isfinite().all(-1) for x in (out, exact))  # [B, H, Nq]
    found = []
    mask = case.key_mask()
    if mask is not None and bool(out[~mask.any(-1)].ne(0).any()):
        found.append(f"step {step}: an entry without keys is not zero")
    if bool(dense_lost.any()) and case.finite:
        return found  # out of reach of the oracle, and of fp64
    if case.finite and bool(lost.any()):
        found.append(f"step {step}: finite in, {int(lost.sum())} of {lost.numel()} rows not finite")
    if not case.finite:
        hidden, extra = dense_lost & ~lost, lost & ~dense_lost
        if case.settings["reconstruction"] != "none" and bool(hidden.any()):
            found.append(f"step {step}: {int(hidden.sum())} rows hide NaN or Inf")
        if bool(extra.any()):
            found.append(f"step {step}: {int(extra.sum())} rows are lost that dense keeps")
    if case.finite and case.settings["density"] == 1.0 and case.settings.get("max_error") is None:
        q, k, v = (float(x.abs().double().max()) if x.numel() else 0.0 for x in case.tensors(step))
        scale = 1 / math.sqrt(case.dim) if case.scale is None else abs(case.scale)
        # a score is rounded in fp32, and the weight of a key is as far off as its score
        allowed = 8 * torch.finfo(case.dtype).eps + 1e-5 + 2**-23 * q * k * math.sqrt(case.dim) * scale
        if flushes(case):
            allowed += case.keys * torch.finfo(torch.float32).tiny / max(v, 1e-300)
        error = worst(out, exact) / max(v, 1e-300)
        if case.fill not in ("huge", "extreme") and error > allowed:
            found.append(f"step {step}: density 1 differs from dense by {error:.1e}")
    return found


def check_receipt(case: Case, step: int, receipt: Any) -> list[str]:
    try:
        told = json.loads(receipt.to_json())
        json.dumps(receipt.to_dict(), allow_nan=False)
    except ValueError as error:
        return [f"step {step}: receipt is no JSON: {error}"]
    found = []
    if not 0 <= told["density"] <= 1 + case.settings["probes"] / max(1, case.queries):
        found.append(f"step {step}: density {told['density']}")
    if case.finite and told["error"] is None and receipt.error_per_head is not None:
        found.append(f"step {step}: finite in, error estimate {receipt.error}")
    str(receipt)
    return found


def backend_of(case: Case) -> str:
    """The backend that takes the case; the plain torch one promises bits for equal calls only."""
    name = case.settings["backend"]
    return "torch" if name == "torch" or library.load().missing else "native"


def flushes(case: Case) -> bool:
    """Whether products of the case go through the bfloat16 instruction of AVX-512, to which operands and sums
    below the smallest normal number are 0, whatever the processor is told to do with them: each key may lose
    as much. `test_products_of_bfloat16_flush_what_is_not_normal` shows it; no other product does that."""
    if case.dtype != torch.bfloat16 or backend_of(case) != "native":
        return False
    return (case.isa or library.load().isas[0]) == "avx512bf16"


def check_repeats(case: Case, outs: list[Tensor], thorough: bool = True) -> list[str]:
    """The same call again: other memory, threads, strides, default dtypes, masked values, neighbours. Not all
    of them for every case, unless it is to be thorough."""
    trials = _trials(case)
    chosen = trials if thorough else [trials[case.seed // 7 % len(trials)]]
    found = []
    for what, again in chosen:
        mine, others = again(outs)
        for step, (a, b) in enumerate(zip(mine, others, strict=True)):
            if not same(a, b):
                found.append(f"step {step}: {what}: differs by {worst(a, b):.2g}")
                break
    return found


Trial = tuple[str, Callable[[list[Tensor]], tuple[list[Tensor], list[Tensor]]]]


def _trials(case: Case) -> list[Trial]:
    """What must change nothing, and a function from the outputs to two lists that must be equal."""

    def under(context: Callable[[], Any], **changed: Any):
        def again(outs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            with context():
                return outs, call(case, **changed)[0]

        return again

    found: list[Trial] = [
        (f"memory filled with {byte:#x}", under(lambda byte=byte: poisoned_memory(byte))) for byte in (NAN, NUMBERS)
    ]
    for dtype in (torch.float64, torch.bfloat16):
        found.append((f"default dtype {dtype}", under(lambda dtype=dtype: default_dtype(dtype))))
    mask = case.key_mask()
    if mask is not None and case.layout != "expanded batch":  # there an entry's keys are another one's too
        for value in (7.0, math.nan):
            found.append((f"masked keys hold {value}", under(nullcontext, hidden=value)))
    native = backend_of(case) == "native"
    if native:  # the plain torch backend promises bits for equal calls only
        found.append(("3 threads", under(lambda: threads(3))))
    if native or case.layout == "plain":
        copies = under(nullcontext, change=lambda tensors: tuple(x.contiguous().clone() for x in tensors))
        found.append(("contiguous copies", copies))
    shared = case.settings.get("balance") or case.fill in ("huge", "extreme")  # budget, or power of two
    if native and case.batch > 1 and not shared:

        def alone(outs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            last = slice(case.batch - 1, None)
            own = call(
                case, lambda tensors: tuple(x[last] for x in tensors), key_mask=None if mask is None else mask[last]
            )[0]
            return [out[last] for out in outs], own

        found.append(("an entry alone", alone))
    return found


def check_backend(case: Case) -> list[str]:
    """What the kernel computed against the fp64 reference on the same route and summary."""
    seen: list[tuple[tuple, dict, tuple[Tensor, Tensor]]] = []
    backend: Backend = backends()["native" if case.settings["backend"] != "torch" else "torch"]
    if backend.unavailable() or not case.finite or case.fill in ("huge", "extreme") or case.seed % 3:
        return []
    original = backend.attend

    def watched(*args: Any, **kwargs: Any):
        result = original(*args, **kwargs)
        seen.append((args, kwargs, tuple(x.clone() for x in result)))
        return result

    backend.attend = watched  # type: ignore[method-assign]
    try:
        call(case)
    finally:
        del backend.attend
    found = []
    for args, kwargs, (out, lse) in seen:
        q, k, v, *rest = args
        plain, plain_lse = Reference().attend(*args, **kwargs)
        exact, exact_lse = Reference().attend(q.double(), k.double(), v.double(), *rest[:3], out_dtype=torch.float64)
        size = float(exact.abs().max()) if exact.numel() else 0.0
        allowed = (
            2 * worst(plain, exact)
            + (4 if out.dtype != torch.float64 else 100) * torch.finfo(out.dtype).eps * size
            + 1e-30
        )
        peaks = [float(x.abs().double().max()) if x.numel() else 0.0 for x in (q, k)]
        allowed += 2**-23 * math.prod(peaks) * math.sqrt(q.shape[-1]) * abs(rest[1]) * size  # of the scores
        if q.dtype == torch.bfloat16:
            allowed += 4 * torch.finfo(torch.bfloat16).eps * size
        if worst(out, exact) > allowed:
            found.append(f"kernel off by {worst(out, exact):.1e}, allowed {allowed:.1e}")
        if worst(lse, exact_lse) > 2 * worst(plain_lse, exact_lse) + 1e-5 * (
            1 + float(exact_lse.nan_to_num(neginf=0.0, posinf=0.0).abs().max() if exact_lse.numel() else 0)
        ):
            found.append(f"kernel log-sum-exp off by {worst(lse, exact_lse):.1e}")
    return found[:1]


def broken_in(part: int) -> str:
    """What is broken in one of the PARTS of the CASES that every test run makes."""
    broken = []
    for seed in range(part, CASES, PARTS):
        case = make(seed)
        broken += [f"{case}\n    {line}" for line in check(case, thorough=False)]
    return "\n".join(broken)

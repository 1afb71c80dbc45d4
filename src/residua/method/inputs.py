"""The only check of user tensors, and numbers at the edge of fp32. What passes here is trusted by every later stage.

Huge numbers are scaled to about 1 by powers of two before a call and back after it, because their squares and
sums would overflow where dense attention does not. Keys and values that are not finite are searched for once
(docs/decisions/0004-not-finite.md): the router keeps the groups of such keys, and the output becomes NaN in the
channels where such values would make dense attention NaN. On a GPU, which must not wait for the answer, broken keys are
found by the centroids of their groups, and broken values by the backend after the call.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..config import Config
from ..errors import InputError
from ..state import State
from ..types import Call, Rows
from ..util.json_text import is_finite
from .stages import SizedCall

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HUGE = 2.0**40  # larger numbers are scaled to about 1; squares and sums of smaller ones are finite in fp32
MAX_SCALE = 2.0**50  # only the order of such scores matters, and their squares are finite in fp32

Span = tuple[int, int] | slice | range
Spans = Span | Iterable[Span] | None

_WAYS_OUT = {
    "attn_mask": "use key_mask=[B, Nk] for padding, pinned_keys= and exact_queries= for text tokens",
    "mask": "use key_mask=[B, Nk] for padding, pinned_keys= and exact_queries= for text tokens",
    "is_causal": "causal attention is not approximated; call dense attention for it",
    "dropout_p": "this is inference only; leave dropout out",
    "dropout": "this is inference only; leave dropout out",
    "enable_gqa": "grouped heads are recognised from the shapes; leave it out",
}


def refuse_unsupported(names: Iterable[str]) -> None:
    """Raises for keywords that other attention functions know and this one does not."""
    for name in names:
        way_out = _WAYS_OUT.get(name, "see help(residua.attention) for the arguments")
        raise InputError(f"attention() does not take {name!r}: {way_out}")


def refuse_settings(config: object, state: object) -> None:
    """Raises for a config or state of another type: it would be ignored, or fail far from its cause."""
    if config is not None and not isinstance(config, Config):
        raise InputError(f"config is {type(config).__name__}: wanted a residua.Config; see Config.from_dict()")
    if state is not None and not isinstance(state, State):
        raise InputError(f"state is {type(state).__name__}: wanted a residua.State, or None for a cold start")


def validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    pinned_keys: Spans = None,
    exact_queries: Spans = None,
    key_mask: Tensor | None = None,
    check_finite: bool = False,
) -> Call:
    """Checks everything that can be checked without reading the tensors' values, then names the parts."""
    _check_tensors(q, k, v)
    _check_shapes(q, k, v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise InputError(
            "q, k or v requires a gradient, and attention() is inference only; call it under torch.no_grad()"
        )
    if key_mask is not None:
        _check_mask(key_mask, q, k)
    head_dim = q.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(head_dim) if head_dim else 1.0
    elif not is_finite(scale):
        raise InputError(f"scale={scale!r}: wanted a finite number, or None for 1/sqrt(D)")
    pinned = _rows(pinned_keys, k.shape[2], "pinned_keys", "Nk")
    exact = _rows(exact_queries, q.shape[2], "exact_queries", "Nq")
    if check_finite:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not bool(torch.isfinite(x).all()):
                raise InputError(f"{name} holds NaN or Inf; look upstream, or leave check_finite off to pass it on")
    return Call(
        q, k, v, float(scale), exact.complement(q.shape[2]), exact, pinned.complement(k.shape[2]), pinned, key_mask
    )


def key_padding(mask: Tensor, batch: int) -> Tensor | None:
    """A boolean attention mask as [B, Nk], True where a key is valid; None if it differs between heads or queries.

    mask [B or 1, Nk] or [B or 1, 1, 1, Nk], of a call with `batch` entries
    """
    per_key = mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1)
    if mask.dtype is not torch.bool or not per_key or mask.shape[0] not in (1, batch):
        return None
    return mask.reshape(mask.shape[0], math.prod(mask.shape[1:])).expand(batch, -1)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is {type(x).__name__}: wanted a torch.Tensor [B, H, N, D]")
        if x.ndim != 4:
            raise InputError(f"{name} has shape {list(x.shape)}: wanted 4 dimensions [B, H, N, D]")
        if x.layout != torch.strided or x.is_quantized:
            raise InputError(f"{name} is {x.layout}: wanted a dense strided tensor")
        if x.dtype not in DTYPES:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InputError(f"{name} is {x.dtype}: wanted one of {wanted}; convert it with .to()")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: wanted one dtype; convert with .to()")
    if not q.device == k.device == v.device:
        raise InputError(f"q, k, v are on {q.device}, {k.device}, {v.device}: wanted one device; move with .to()")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[:3] != v.shape[:3]:
        raise InputError(f"k {list(k.shape)} and v {list(v.shape)}: wanted the same [B, Hkv, Nk]")
    if q.shape[0] != k.shape[0]:
        raise InputError(f"q has batch {q.shape[0]} and k has {k.shape[0]}: wanted the same")
    if q.shape[3] != k.shape[3]:
        raise InputError(f"q has head_dim {q.shape[3]} and k has {k.shape[3]}: wanted the same")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise InputError(f"q {list(q.shape)}, v {list(v.shape)}: wanted a head_dim of at least 1")
    heads, kv_heads = q.shape[1], k.shape[1]
    if (kv_heads == 0) != (heads == 0) or (kv_heads and heads % kv_heads):
        raise InputError(f"q has {heads} heads and k has {kv_heads}: wanted a multiple of the K/V heads")


def _check_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    wanted = [k.shape[0], k.shape[2]]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"key_mask is {got}: wanted torch.bool {wanted}, True = real token")
    if list(mask.shape) != wanted:
        raise InputError(f"key_mask has shape {list(mask.shape)}: wanted [B, Nk] = {wanted}")
    if mask.device != q.device:
        raise InputError(f"key_mask is on {mask.device} and q on {q.device}: move it with .to()")


def _rows(spans: Spans, total: int, name: str, letter: str) -> Rows:
    """Sorted, merged ranges from (start, stop) pairs, slices or ranges."""
    if spans is None:
        return Rows(())
    single = isinstance(spans, (slice, range)) or (
        isinstance(spans, (tuple, list)) and len(spans) == 2 and all(isinstance(edge, int) for edge in spans)
    )
    try:
        items = [spans] if single else list(spans)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name}={spans!r}: wanted a range (start, stop) or a list of ranges") from None
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(_edges(item, total, name, letter) for item in items):
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return Rows(tuple(merged))


def _edges(span: object, total: int, name: str, letter: str) -> tuple[int, int]:
    wanted = f"wanted (start, stop) with 0 <= start <= stop <= {letter} = {total}"
    if isinstance(span, slice):
        start, stop, step = span.indices(total)
        stop = max(start, stop)
    elif isinstance(span, range):
        start, stop, step = span.start, span.stop, span.step
    elif isinstance(span, (tuple, list)) and len(span) == 2 and all(type(edge) is int for edge in span):
        (start, stop), step = span, 1
    else:
        raise InputError(f"{name} contains {span!r}: {wanted}")
    if step != 1 or not 0 <= start <= stop <= total:
        raise InputError(f"{name} contains {span!r}: {wanted}")
    return start, stop


def rescale(sized: SizedCall) -> tuple[SizedCall, int]:
    """The call with huge numbers scaled to about 1, and with a record of what is not finite; as it is if the host must
    not wait for the sizes of its numbers. With it the power of two that its output must be multiplied with."""
    call, backend = sized.call, sized.backend
    if not (sized.rules.host_may_wait and call.q.numel() and call.k.numel()):
        return sized, 0
    (peak_q, _), (peak_k, good_k), (peak_v, good_v) = (backend.row_peaks(x) for x in (call.q, call.k, call.v))
    hidden = None if call.key_mask is None else ~call.key_mask[:, None]
    if hidden is not None:  # padding does not count
        peak_k, peak_v = (peak.masked_fill(hidden, 0.0) for peak in (peak_k, peak_v))
        good_k, good_v = good_k | hidden, good_v | hidden
    if not (bool(good_k.all()) and bool(good_v.all())):
        call = _noted(call, good_k, good_v)
    largest_q, largest_k, largest_v = (float(peak.max()) for peak in (peak_q, peak_k, peak_v))
    if max(largest_q, largest_k) > HUGE:
        powers = [_power(largest_q), _power(largest_k)]
        scale = math.ldexp(call.scale, min(sum(powers), 900))
        scale = math.copysign(min(abs(scale), MAX_SCALE), scale)
        call = replace(call, q=_shrunk(call.q, powers[0]), k=_shrunk(call.k, powers[1]), scale=scale)
    power = _power(largest_v) if largest_v > HUGE else 0
    if power:
        call = replace(call, v=_shrunk(call.v, power))
    return replace(sized, call=call), power


def restore(out: Tensor, sized: SizedCall, power: int) -> Tensor:
    """The output [B, H, Nq, Dv] in the units of the user's values, with NaN where dense attention would have NaN, and 0
    in entries without any key. Call and power are those from `rescale`."""
    call, backend = sized.call, sized.backend
    # whether values that are not finite reach every row, even from skipped groups
    passes_on = sized.config.reconstruction != "none"
    if power:
        limit = torch.finfo(out.dtype).max
        half = power // 2  # 2**power alone may be too large even for fp64
        grown = out.double() * 2.0**half * 2.0 ** (power - half)
        out = torch.where(out.isfinite(), grown.clamp(-limit, limit), grown).to(out.dtype)
    broken = call.broken_channels
    if broken is None and passes_on and not sized.rules.host_may_wait:
        broken = backend.lost_channels(call.v, call.key_mask)
    if broken is not None and passes_on:
        lost = broken.repeat_interleave(call.heads_per_kv, dim=1)[:, :, None, :]  # [B, H, 1, Dv]
        out = backend.spoil(out, lost)
    if call.key_mask is not None:
        out = out.masked_fill(~call.key_mask.any(-1)[:, None, None, None], 0.0)
    return out


def _noted(call: Call, good_keys: Tensor, good_values: Tensor) -> Call:
    """good_keys, good_values [B, Hkv, Nk] bool"""
    broken, lost = ~good_keys, ~torch.isfinite(call.v)
    if call.key_mask is not None:
        broken, lost = broken & call.key_mask[:, None], lost & call.key_mask[:, None, :, None]
    return replace(call, broken_keys=broken, broken_channels=lost.any(2))


def _power(peak: float) -> int:
    """The power of two just above a number; 0 for 0."""
    return math.frexp(peak)[1]


def _shrunk(x: Tensor, power: int) -> Tensor:
    half = power // 2  # 2**-power alone may be too small for the dtype
    return x * 2.0**-half * 2.0 ** (half - power) if power else x

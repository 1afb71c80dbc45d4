"""Numbers at the edge of fp32, and beyond: huge, infinite, NaN (docs/decisions/0004-not-finite.md).

Huge numbers are scaled to about 1 by powers of two before a call and back after it, because their squares and
sums would overflow where dense attention does not. Keys and values that are not finite are searched for once:
the router keeps the groups of such keys, and the output becomes NaN in the channels where such values would
make dense attention NaN. On a GPU, which must not wait for the answer, broken keys are found by the centroids
of their groups, and broken values by the backend after the call.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..types import Call
from .stages import SizedCall

HUGE = 2.0**40  # larger numbers are scaled to about 1; squares and sums of smaller ones are finite in fp32
MAX_SCALE = 2.0**50  # only the order of such scores matters, and their squares are finite in fp32


def rescale(sized: SizedCall) -> tuple[SizedCall, int]:
    """The call with huge numbers scaled to about 1, and with a record of what is not finite.

    Args:
        sized: The call; it is returned as it is if the host must not wait for the sizes of its numbers.

    Returns:
        The call, and the power of two that its output must be multiplied with.
    """
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
    """The output in the units of the user's values, with NaN where dense attention would have NaN.

    Args:
        out: [B, H, Nq, Dv] as computed from the rescaled call.
        sized: The rescaled call.
        power: As from `rescale`.

    Returns:
        The output; entries without any key are 0.
    """
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

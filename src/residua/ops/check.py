"""Checks routes that come from outside: they must fit the tensors they are used with."""

import torch
from torch import Tensor

from ..errors import RouteError
from ..types import Call, Drift, Partition, Route, SummaryKeys


def check_partition(partition: Partition, batch: int, heads: int, tokens: int, name: str) -> None:
    """Raises RouteError unless labels, order and offsets agree with each other and with the token count."""
    labels, order, offsets = partition.labels, partition.order, partition.offsets
    for part, tensor, last in (("labels", labels, tokens), ("order", order, tokens), ("offsets", offsets, None)):
        if tensor.dtype != torch.long:
            raise RouteError(f"{name}.{part} is {tensor.dtype}: wanted int64")
        got, wanted = list(tensor.shape), [batch, heads, "groups + 1" if last is None else last]
        if len(got) != 3 or got[:2] != wanted[:2] or (got[2] < 1 if last is None else got[2] != last):
            raise RouteError(f"{name}.{part} has shape {got}: wanted {wanted}")
    way_out = "build partitions with Partition.from_labels(labels, groups)"
    if not batch * heads:
        return
    if bool((offsets[..., 0] != 0).any()) or bool((offsets.diff(dim=-1) < 0).any()):
        raise RouteError(f"{name}.offsets must start at 0 and never fall; {way_out}")
    if bool((offsets[..., -1] > tokens).any()):
        raise RouteError(
            f"{name}.offsets reach {int(offsets.max())} of {tokens} tokens: sizes do not add up; {way_out}"
        )
    everything = torch.arange(tokens, device=order.device).expand_as(order)
    if not torch.equal(order.sort(dim=-1).values, everything):
        raise RouteError(f"{name}.order repeats or misses tokens: wanted a permutation of 0..{tokens - 1}; {way_out}")
    place = torch.searchsorted(offsets.contiguous(), everything.contiguous(), right=True) - 1  # group of each place
    place = torch.where(place >= partition.groups, -1, place)
    if not torch.equal(labels.gather(-1, order), place):
        raise RouteError(f"{name}.labels do not agree with order and offsets; {way_out}")
    if bool(((order.diff(dim=-1) < 0) & (place.diff(dim=-1) == 0)).any()):
        raise RouteError(f"{name}.order is not ascending inside a group; {way_out}")


def check_route(route: Route, call: Call) -> None:
    """Raises RouteError if the route contradicts itself or the call's shapes."""
    batch, heads, queries, _ = call.q.shape
    for name, partition in (("query", route.query), ("kv", route.kv)):
        for part in ("labels", "order", "offsets"):
            device = getattr(partition, part).device
            if device != call.q.device:
                raise RouteError(f"route.{name}.{part} is on {device} and q on {call.q.device}: wanted one device")
    check_partition(route.query, batch, heads, queries, "route.query")
    check_partition(route.kv, batch, call.k.shape[1], call.k.shape[2], "route.kv")
    _check(route.cells, [batch, heads, route.query.groups, route.kv.groups], call, "route.cells", torch.bool)


def check_summary(summary: SummaryKeys | None, route: Route, call: Call) -> None:
    """Raises RouteError if summary keys or their drift do not fit the route; compiled backends do not check."""
    if summary is None:
        return
    groups = [*call.q.shape[:2], route.query.groups]
    count = summary.log_weight.shape[-1] if summary.log_weight.ndim else 0
    _check(summary.keys, [*groups, count, call.q.shape[-1]], call, "summary.keys")
    _check(summary.values, [*groups, count, call.v.shape[-1]], call, "summary.values")
    _check(summary.log_weight, [*groups, count], call, "summary.log_weight")
    if summary.drift is not None:
        _check_drift(summary.drift, groups, call)


def _check_drift(drift: Drift, groups: list[int], call: Call) -> None:
    rank = drift.basis.shape[-1] if drift.basis.ndim else 0
    batch, kv_heads, _, dim = call.k.shape
    _check(drift.basis, [batch, kv_heads, dim, rank], call, "summary.drift.basis")
    _check(drift.origin, [*groups, rank], call, "summary.drift.origin")
    _check(drift.curve, [*groups, rank], call, "summary.drift.curve")
    _check(drift.slope, [*groups, rank, call.v.shape[-1]], call, "summary.drift.slope")


def _check(tensor: Tensor, shape: list[int], call: Call, name: str, dtype: torch.dtype | None = None) -> None:
    """Shape and device; and the dtype, which may be any of floating point where none is given."""
    if list(tensor.shape) != shape:
        raise RouteError(f"{name} has shape {list(tensor.shape)}: wanted {shape}")
    if tensor.device != call.q.device:
        raise RouteError(f"{name} is on {tensor.device} and q on {call.q.device}: wanted one device")
    if tensor.dtype != dtype and (dtype is not None or not tensor.is_floating_point()):
        raise RouteError(f"{name} is {tensor.dtype}: wanted {dtype or 'a floating-point type'}")

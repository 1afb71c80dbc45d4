"""Corrupt routes raise RouteError before anything is computed; a good plan still runs after it."""

import dataclasses

import pytest
import torch

from residua import Partition, Route, RouteError, SummaryKeys
from residua.api import attend_route
from residua.types import Drift
from tests.support.oracle import normal, qkv, random_route

Q, K, V = qkv(1, 2, 2, 90, 110)
GOOD = random_route(lowest=-1)


def changed(partition, **parts):
    copies = {name: getattr(partition, name).clone() for name in ("labels", "order", "offsets")}
    for name, change in parts.items():
        result = change(copies[name])
        copies[name] = copies[name] if result is None else result
    return Partition(**copies)


def put(index, value):
    def change(tensor):
        tensor[index] = value

    return change


def swap(tensor):
    tensor[0, 1, [3, 4]] = tensor[0, 1, [4, 3]]


CORRUPT = {
    "order repeats a token": {"order": put((0, 1, 5), int(GOOD.query.order[0, 1, 6]))},
    "order out of range": {"order": put((0, 0, 0), 10_000)},
    "order negative": {"order": put((0, 0, 0), -1)},
    "order unsorted inside a group": {"order": swap},
    "offsets do not start at 0": {"offsets": put((0, 0, 0), 1)},
    "offsets fall": {"offsets": put((0, 1, 2), 0)},
    "offsets beyond the tokens": {"offsets": put((0, 1, -1), 1000)},
    "sizes do not add up": {"offsets": put((0, 1, -1), 0)},
    "labels disagree": {"labels": put((0, 0, 7), (int(GOOD.query.labels[0, 0, 7]) + 1) % 5)},
    "labels out of range": {"labels": put((0, 0, 7), 99)},
    "labels of another type": {"labels": lambda t: t.int()},
    "offsets of another type": {"offsets": lambda t: t.float()},
    "one token too few": {"labels": lambda t: t[..., 1:], "order": lambda t: t[..., 1:]},
    "a head too many": {"offsets": lambda t: t.repeat(1, 2, 1)},
    "no offsets": {"offsets": lambda t: t[..., :0]},
    "offsets without dimensions": {"offsets": lambda t: torch.tensor(0)},
    "labels without a batch": {"labels": lambda t: t[0]},
}


@pytest.mark.parametrize("side", ["query", "kv"])
@pytest.mark.parametrize("name", CORRUPT)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_corrupt_partition_is_refused_and_the_good_one_still_runs(side, name, backend):
    before = attend_route(Q, K, V, GOOD, backend=backend)
    bad = dataclasses.replace(GOOD, **{side: changed(getattr(GOOD, side), **CORRUPT[name])})
    with pytest.raises(RouteError, match=f"route.{side}"):
        attend_route(Q, K, V, bad, backend=backend)
    after = attend_route(Q, K, V, GOOD, backend=backend)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    "cells, message",
    [
        (GOOD.cells[..., 1:], "wanted \\[1, 2, 5, 7\\]"),
        (GOOD.cells[:, :1], "wanted \\[1, 2, 5, 7\\]"),
        (GOOD.cells.float(), "wanted torch.bool"),
        (GOOD.cells.to("meta"), "wanted one device"),
    ],
)
def test_cells_that_do_not_fit(cells, message):
    with pytest.raises(RouteError, match=message):
        attend_route(Q, K, V, dataclasses.replace(GOOD, cells=cells))


def test_a_route_for_other_tensors():
    for q, k in ((Q[:, :, 1:], K), (Q, K[:, :, 1:]), (Q[:, :1], K[:, :1])):
        with pytest.raises(RouteError):
            attend_route(q, k, k, GOOD)


@pytest.mark.parametrize(
    "part, shape", [("keys", (1, 2, 5, 3, 15)), ("values", (1, 2, 4, 3, 16)), ("log_weight", (1, 2, 5, 4))]
)
def test_summary_keys_that_do_not_fit(part, shape):
    summary = SummaryKeys(normal(1, 2, 5, 3, 16), normal(1, 2, 5, 3, 16), normal(1, 2, 5, 3))
    attend_route(Q, K, V, GOOD, summary=summary, backend="torch")
    bad = dataclasses.replace(summary, **{part: normal(*shape)})
    with pytest.raises(RouteError, match=r"summary\."):
        attend_route(Q, K, V, GOOD, summary=bad, backend="torch")


DRIFT = {"basis": (1, 2, 16, 4), "origin": (1, 2, 5, 4), "curve": (1, 2, 5, 4), "slope": (1, 2, 5, 4, 16)}


@pytest.mark.parametrize("part", DRIFT)
@pytest.mark.parametrize("change", ["short", "long", "other groups", "flat", "scalar", "integers", "device"])
def test_a_drift_that_does_not_fit(part, change):
    summary = SummaryKeys(
        normal(1, 2, 5, 3, 16),
        normal(1, 2, 5, 3, 16),
        normal(1, 2, 5, 3),
        Drift(**{name: normal(*shape) for name, shape in DRIFT.items()}),
    )
    before = attend_route(Q, K, V, GOOD, summary=summary)
    tensor = getattr(summary.drift, part)
    wrong = {
        "short": tensor[..., :-1],
        "long": torch.cat([tensor, tensor], -1),
        "other groups": tensor[:, :, 1:],
        "flat": tensor.flatten(),
        "scalar": torch.tensor(1.0),
        "integers": tensor.long(),
        "device": tensor.to("meta"),
    }[change]
    bad = dataclasses.replace(summary, drift=dataclasses.replace(summary.drift, **{part: wrong}))
    with pytest.raises(RouteError, match=r"summary\.drift\."):
        attend_route(Q, K, V, GOOD, summary=bad)
    assert torch.equal(before[0], attend_route(Q, K, V, GOOD, summary=summary)[0])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("batch, heads, queries, keys", [(0, 2, 5, 6), (1, 2, 0, 6), (1, 2, 5, 0), (1, 0, 5, 6)])
def test_nothing_to_do_is_no_error(backend, batch, heads, queries, keys):
    q, k = torch.zeros(batch, heads, queries, 4), torch.zeros(batch, heads, keys, 4)
    route = Route(
        Partition.from_labels(torch.zeros(batch, heads, queries, dtype=torch.long), 2),
        Partition.from_labels(torch.zeros(batch, heads, keys, dtype=torch.long), 3),
        torch.ones(batch, heads, 2, 3, dtype=torch.bool),
    )
    out, lse = attend_route(q, k, k, route, backend=backend)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:3] and (keys > 0 or (lse == -torch.inf).all())


def test_sizes_without_tokens_are_refused():
    q, k = torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 0, 4)
    nothing = torch.zeros(1, 1, 0, dtype=torch.long)
    query = Partition.from_labels(torch.zeros(1, 1, 5, dtype=torch.long), 1)
    kv = Partition(nothing, nothing, torch.tensor([[[0, 3]]]))
    with pytest.raises(RouteError, match=r"route\.kv"):
        attend_route(q, k, k, Route(query, kv, torch.ones(1, 1, 1, 1, dtype=torch.bool)))

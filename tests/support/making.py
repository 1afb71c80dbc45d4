"""Calls, groupings and stages for the tests of the reconstructions, from labels that a test chooses."""

from dataclasses import replace

import torch
from torch import Tensor

from residua import Config, Partition, Route
from residua.method.grouping.partition import group_tokens
from residua.method.inputs import validate
from residua.method.reconstructions import RECONSTRUCTIONS
from residua.method.stages import GroupedCall, SizedCall, Verdict
from residua.ops.backend import Backend, TorchBackend
from residua.types import Call, Grouping


def partition(labels: Tensor, groups: int | None = None) -> Partition:
    return Partition.from_labels(labels, int(labels.max()) + 1 if groups is None else groups)


def grouping_of(call: Call, query: Partition, kv: Partition, pinned_groups: int = 0) -> Grouping:
    """A grouping with those partitions; centroids are plain means."""
    backend = Backend()
    means = backend.group_means(call.q, query), backend.group_means(call.k, kv)
    return Grouping(query, kv, *means, call.q.float(), pinned_groups)


def grouped_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: Config,
    density: float | None = None,
    backend: Backend | None = None,
    **spans: object,
) -> GroupedCall:
    """What a reconstruction gets, as the pipeline would make it."""
    call = validate(q, k, v, **spans)  # type: ignore[arg-type]
    sized = SizedCall.of(call, config, backend or TorchBackend())
    allowed = torch.full(q.shape[:2], density or config.density, dtype=torch.float64)
    return sized.grouped(group_tokens(sized), allowed)


def in_groups(
    call: Call, grouping: Grouping, backend: Backend | None = None, config: Config | None = None, **sizes: int
) -> GroupedCall:
    """A call with groups that a test has made, and with the `Sizes` that it names."""
    config = config or Config()
    sized = SizedCall.of(call, config, backend or Backend())
    allowed = torch.full(call.q.shape[:2], config.density, dtype=torch.float64)
    return replace(sized, sizes=replace(sized.sizes, **sizes)).grouped(grouping, allowed)


def stages(name: str, grouped: GroupedCall) -> Verdict:
    """The verdict of a reconstruction, after its stages up to there ran as in the pipeline."""
    method, _ = RECONSTRUCTIONS[name].affordable(grouped)
    routing = method.route(grouped)
    return method.judge(grouped, routing, method.summarise(grouped, routing))


def random_cells(grouping: Grouping, heads: int, keep: float = 0.4, seed: int = 0) -> Route:
    """Random cells, with every pinned group kept."""
    shape = (grouping.query.labels.shape[0], heads, grouping.query.groups, grouping.kv.groups)
    cells = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < keep
    if grouping.pinned_groups:
        cells[..., -grouping.pinned_groups :] = True
    return Route(grouping.query, grouping.kv, cells, grouping.pinned_groups)


def spend(backend: Backend, log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
    """The cells [B, H, Cq, Ck] that one budget buys by their share of a row's mass."""
    return backend.best_cells(log_share, query_sizes, kv_sizes, [budget], shares=True)[0]

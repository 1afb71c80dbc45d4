"""What each head does about the pairs that it skips, and how far off it is then: probe rows are computed exactly, and
the candidates are compared on them."""

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.backend import Backend
from ..ops.grouping import count_labels
from ..types import Choice, Probes, Route, SummaryKeys
from ..util.golden import golden_order
from .sizes import of_whole_call
from .stages import GroupedCall, Routing, Verdict

DRAWS, HASH = 1 << 20, 2654435761  # Knuth's multiplier
# In the order of `Backend.candidate_errors`, which leaves the first one out where nothing drifts.
CANDIDATES = (Choice.WITH_DRIFT, Choice.WITHOUT_DRIFT, Choice.WITHOUT_SUMMARY)
HANDICAP = 0.9  # a simpler candidate must be better by this factor: noise must not decide
# A head whose estimate is above the bound by more than this runs dense at once; one that is less far off may
# only be badly estimated, and is given more in its next call.
CLEARLY_ABOVE = 1.5


def choose_rows(
    coordinates: Tensor,
    labels: Tensor,
    groups: int,
    count: int,
    policy: str = "stratified",
    generator: torch.Generator | None = None,
    *,
    order: str = "spread",
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Chooses `count` distinct rows per head (all rows if there are fewer). If fewer than `count` rows have a
    group, the rest is filled with rows of weight 0.

    "stratified" visits the groups in turn, in the order that `order` names (see `visiting_order`), and takes
    from each the row nearest to the group's mean that is not taken yet (ties: the lower row index); "uniform"
    spaces rows evenly over the sequence; "random" draws them from `generator` (default: one with a fixed
    seed); "scattered" cuts the rows, sorted by group, into `count` equal parts and draws one from each.

    coordinates [B, H, N, R], labels [B, H, N] (-1: not a candidate)
    -> rows [B, H, M] int64, weights [B, H, M] fp32 = |group| / probes in the group
    """
    count = min(count, labels.shape[-1])
    if policy == "stratified":
        turn = visiting_order(labels, groups, order)  # [B, H, groups]
        visited = torch.where(labels < 0, labels, turn.gather(-1, labels.clamp(min=0)))
        rows = backend.central_rows(coordinates, visited, groups, count)
    elif policy == "uniform":
        candidates = (labels < 0).to(torch.uint8).argsort(dim=-1, stable=True)  # those with a group first
        among = (labels >= 0).sum(-1, keepdim=True).clamp(min=count)
        rows = candidates.gather(-1, torch.arange(count, device=labels.device) * among // max(1, count))
    elif policy == "random":
        generator = generator or torch.Generator().manual_seed(0)
        # the same draw for every batch entry, so that its result does not depend on the other entries
        drawn = torch.rand(labels.shape[1:], generator=generator, dtype=torch.float32, device=generator.device).to(
            labels.device
        )
        rows = torch.where(labels < 0, 2.0, drawn).topk(count, dim=-1, largest=False).indices
    elif policy == "scattered":
        found = backend.sort_groups(labels, groups)
        return _scattered(found.order, found.offsets[..., -1:], count, generator)
    else:
        raise InputError(f"policy={policy!r}: wanted 'stratified', 'uniform', 'random' or 'scattered'")
    return rows, coverage_weights(rows, labels, groups)


def visiting_order(labels: Tensor, groups: int, order: str) -> Tensor:
    """The place of every group in the order in which stratified probes visit the groups. If there are more
    groups than probes, it decides which groups get one.

    Args:
        labels: [B, H, N], the group of every row, or -1.
        groups: How many groups there are.
        order: "spread" over the group index by the golden ratio: neighbours by index are neighbours in the
            video, so the first probes already span it; "largest" groups first; or by "index".

    Returns:
        [B, H, groups] int64, a permutation of range(groups) for every head.
    """
    index = torch.arange(groups, device=labels.device)
    if order == "index":
        return index.expand(*labels.shape[:-1], groups)
    if order == "spread":
        first = golden_order(groups, labels.device)  # [groups], in visiting order
        return torch.empty_like(index).scatter_(0, first, index).expand(*labels.shape[:-1], groups)
    if order == "largest":
        first = count_labels(labels, groups).argsort(dim=-1, descending=True, stable=True)
        return torch.empty_like(first).scatter_(-1, first, index.expand_as(first))
    raise InputError(f"order={order!r}: wanted 'spread', 'largest' or 'index'")


def _scattered(
    order: Tensor, candidates: Tensor, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """A random row of every part, with the size of the part as its weight. The draw is the same for every
    head, so that its result does not depend on the other heads.

    order [B, H, N]: rows sorted by group; only the first `candidates` [B, H, 1] of them have a group
    """
    part = torch.arange(count, device=order.device)
    if generator is None:
        drawn = part * HASH % DRAWS  # by multiplicative hashing: nothing to copy to the device
    else:
        drawn = torch.randint(DRAWS, (count,), generator=generator, device=generator.device).to(order.device)
    edges = torch.arange(count + 1, device=order.device) * candidates.clamp(min=count) // max(1, count)
    size = edges.diff(dim=-1)  # [B, H, M]
    place = edges[..., :-1] + drawn * size // DRAWS
    return order.gather(-1, place), torch.where(place < candidates, size, 0).float()


def coverage_weights(rows: Tensor, labels: Tensor, groups: int) -> Tensor:
    """|G_a| / m_a for every probe of group a, so that the probes of a group together stand for its size;
    0 for a row of no group.  # [B, H, M] fp32"""
    chosen = labels.gather(-1, rows)  # [B, H, M]
    probes = count_labels(chosen, groups)
    group = chosen.clamp(min=0)
    weights = count_labels(labels, groups).gather(-1, group).float() / probes.gather(-1, group).clamp(min=1)
    return torch.where(chosen >= 0, weights, 0.0)


def take_probes(grouped: GroupedCall, policy: str) -> Probes:
    """Selects the probes among the free query rows and evaluates them against every key."""
    call, backend = grouped.call, grouped.backend
    rows, weights = place_probes(grouped, policy)
    exact = backend.attend_rows(backend.gather_rows(call.q, rows), call.k, call.v, call.key_mask, call.scale)
    return Probes(rows, weights, exact)


def place_probes(grouped: GroupedCall, policy: str) -> tuple[Tensor, Tensor]:
    """Rows among all query rows, and their weights; see `choose_rows`."""
    call, grouping, count = grouped.call, grouped.grouping, grouped.sizes.probes
    if policy == "scattered":
        # rows without a group come last, so the first part of the partition's order is that of the free rows
        free = call.free_queries.count
        return _scattered(grouping.query.order, grouping.query.offsets[..., -1:], min(count, free), None)
    labels = call.free_queries.take(grouping.query.labels, 2)
    groups, order = grouping.query.groups, grouped.config.probe_order
    rows, weights = choose_rows(
        grouping.coordinates, labels, groups, count, policy, order=order, backend=grouped.backend
    )
    return call.free_queries.index(call.q.device)[rows], weights


def judge(grouped: GroupedCall, routing: Routing, summary: SummaryKeys, policy: str) -> Verdict:
    """Takes the probes, placed as `policy` says, and lets every head choose; route and summary stay as given."""
    call, backend, route = grouped.call, grouped.backend, routing.route
    assert routing.without_summary is not None
    index, weights = place_probes(grouped, policy)
    rows = backend.gather_rows(call.q, index)
    group = grouped.grouping.query.labels.gather(-1, index).clamp(min=0)  # [B, H, M]
    kept = route.cells.gather(2, group[..., None].expand(*group.shape, route.cells.shape[3]))
    exact, *sparse = backend.split_rows(rows, call.k, call.v, route.kv, kept, call.key_mask, call.scale)
    skipped = _summary_alone(grouped, rows, group, route.cells, summary)
    errors = backend.candidate_errors(rows, group, exact, (sparse[0], sparse[1]), skipped, summary.drift)
    choice, sparse_error = choose(grouped, errors, weights, routing.without_summary)
    error = sparse_error
    if grouped.config.max_error is not None:
        error = torch.where(choice == Choice.DENSE, 0.0, sparse_error)

    def costs() -> dict[str, Tensor]:
        sizes = route.kv.sizes.repeat_interleave(call.heads_per_kv, dim=1)[..., None, :]
        # the exact pass holds the scores already; only the values are summed a second time
        share = call.v.shape[3] / (call.q.shape[3] + call.v.shape[3])
        return {"judging": share * (kept * sizes).sum((-2, -1)).double()}

    return Verdict(route, summary, Probes(index, weights, exact), choice, error, sparse_error, costs)


def choose(grouped: GroupedCall, errors: Tensor, weights: Tensor, without_summary: Tensor) -> tuple[Tensor, Tensor]:
    """The best candidate of every head, and its error; a head that runs dense keeps the error that the best
    sparse candidate would have had.

    errors [candidates, B, H, M] fp32, of every probe row with each candidate, the simplest last;
    weights [B, H, M] fp32; without_summary [B, H] bool, heads that have no summary to choose
    -> choice [B, H] int64, error [B, H] fp32
    """
    best, error = grouped.backend.best_candidate(errors, weights, without_summary, HANDICAP)
    best = best + int(CANDIDATES[-len(errors)])  # from the place among the candidates to the `Choice`
    if grouped.config.max_error is not None:
        bound = grouped.config.max_error
        most = of_whole_call(grouped.call, torch.full_like(grouped.allowed, grouped.config.ceiling))
        dense = (error > bound) & (grouped.allowed >= most) | (error > CLEARLY_ABOVE * bound)
        best = torch.where(dense, int(Choice.DENSE), best)
    return best, error


def _summary_alone(
    grouped: GroupedCall, rows: Tensor, group: Tensor, cells: Tensor, summary: SummaryKeys
) -> tuple[Tensor, Tensor]:
    """The probe rows over the summary keys of their groups, without the drift.

    -> output [B, H, M, Dv], log-sum-exp [B, H, M], fp32
    """
    call, backend, kv = grouped.call, grouped.backend, grouped.grouping.kv
    query = backend.sort_groups(group, summary.keys.shape[2])
    # A route without K/V groups, not one whose cells are all False: a kernel then reads no cells.
    nobody = kv.labels.new_full((1, 1, 1), -1).expand_as(kv.labels)
    nothing = Route(query, replace(kv, labels=nobody, offsets=kv.offsets[..., :1]), cells[..., :0])
    return backend.attend(rows, call.k, call.v, nothing, call.scale, replace(summary, drift=None), torch.float32)

"""The numbers of one call: what a Config asks for, cut to what the tensors allow, with a note per cut."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config
from .types import Call

QUERIES_PER_GROUP = 252  # what the authors ran: 300 query and 1000 K/V groups at 75,600 tokens
KEYS_PER_GROUP = 76
# Short calls need finer groups than that (docs/decisions/0002-group-counts.md): at least these many,
MIN_QUERY_GROUPS = 64
MIN_KV_GROUPS = 128
# as long as a group is not smaller than a kernel tile,
MIN_QUERIES_PER_GROUP = 64
MIN_KEYS_PER_GROUP = 32
# and in tiny calls these many whatever their size, so that a route has something to choose from.
FEWEST_QUERY_GROUPS = 4
FEWEST_KV_GROUPS = 8
# Summary keys of a query group in calls with fewer free queries than LONG_CALL, and in longer ones.
SHORT_CALL_SLOTS = 64
LONG_CALL_SLOTS = 128
LONG_CALL = 16384
DRIFT_RANK = 16
# Below this density the summary carries the call: finer groups, paid for by a fixed part of the budget
# (docs/decisions/0011-sizes-by-budget.md).
LOW_DENSITY = 0.15
ANCHOR_SHARE = 1 / 8  # query groups for every query that the budget pays a full row for
MIN_QUERIES_PER_ANCHOR = 126
KEYS_PER_SUMMARY_GROUP = 32
MAX_SUMMARY_GROUPS = 512
SLOT_SHARE = 0.15  # of the budget that may go into attending to the summary
MANY_SLOTS, SOME_SLOTS, FEW_SLOTS = 128, 64, 32
# With as many heads as this, and more heads than tokens, the two were probably exchanged.
MANY_HEADS = 256


@dataclass(frozen=True)
class Sizes:
    query_groups: int
    kv_groups: int
    key_rank: int
    query_rank: int
    metric_rows: int
    metric_spacing: str
    probes: int
    residual_rank: int
    single_slots: int  # summary keys of a query group that stand for one skipped K/V group each
    merged_slots: int  # summary keys of a query group that share all the other skipped ones
    drift_rank: int
    notes: tuple[str, ...]


def default_groups(queries: int, keys: int) -> tuple[int, int]:
    """Group counts for that many free tokens: in proportion for long calls, finer for short ones."""
    fine_queries = min(MIN_QUERY_GROUPS, max(FEWEST_QUERY_GROUPS, queries // MIN_QUERIES_PER_GROUP))
    fine_keys = min(MIN_KV_GROUPS, max(FEWEST_KV_GROUPS, keys // MIN_KEYS_PER_GROUP))
    return (
        max(1, min(queries, max(fine_queries, round(queries / QUERIES_PER_GROUP)))),
        max(1, min(keys, max(fine_keys, round(keys / KEYS_PER_GROUP)))),
    )


def summary_groups(queries: int, keys: int, density: float) -> tuple[int, int]:
    """Group counts for that many free tokens where skipped groups are summarised: the same as by default at
    ordinary densities, finer and by the budget at low ones."""
    coarse = default_groups(queries, keys)
    if density >= LOW_DENSITY:
        return coarse
    most = max(coarse[0], queries // MIN_QUERIES_PER_ANCHOR)
    fine = max(FEWEST_QUERY_GROUPS, min(most, round(ANCHOR_SHARE * density * queries)))
    return (
        max(1, min(queries, fine)),
        max(coarse[1], min(MAX_SUMMARY_GROUPS, keys // KEYS_PER_SUMMARY_GROUP)),
    )


def summary_sizes(queries: int, density: float, cpu: bool) -> tuple[int, int]:
    """Summary keys per query group, and drift rank."""
    if density >= LOW_DENSITY:
        return LONG_CALL_SLOTS if queries >= LONG_CALL else SHORT_CALL_SLOTS, DRIFT_RANK
    affordable = SLOT_SHARE * density * queries
    if affordable < 0.75 * MANY_SLOTS:
        return (SOME_SLOTS if affordable > 0.85 * SOME_SLOTS else FEW_SLOTS), DRIFT_RANK
    # On a GPU a drift of rank 32 does not fit the registers of the kernels.
    return MANY_SLOTS, 2 * DRIFT_RANK if cpu else DRIFT_RANK


MANY_CELLS = 1 << 16  # fewer cost nothing that matters
CELL_COST = 8  # pairs: a cell is scored, sorted and perhaps summarised


def resolve(config: Config, call: Call) -> Sizes:
    """Clamps every count of the config to the call; each clamp leaves a note for the receipt."""
    notes: list[str] = []

    def clamp(name: str, wanted: int, most: int, why: str) -> int:
        if wanted <= most:
            return wanted
        notes.append(f"{name}={wanted} clamped to {most}: {why}")
        return most

    heads, tokens = call.q.shape[1:3]
    if heads >= MANY_HEADS and heads > tokens:
        notes.append(
            f"q has {heads} heads of {tokens} tokens: wanted [B, H, N, D]; if yours is [B, N, H, D], pass "
            "q.transpose(1, 2), and k and v likewise"
        )
    queries, keys = call.free_queries.count, call.free_keys.count
    head_dim, value_dim = call.q.shape[-1], call.v.shape[-1]
    by_default = default_groups(queries, keys)
    if config.summarises:
        by_default = summary_groups(queries, keys, config.density)
    slots_by_default, rank_by_default = summary_sizes(queries, config.density, call.q.device.type == "cpu")
    query_groups = clamp(
        "query_groups", config.query_groups or by_default[0], max(1, queries), "as many queries"
    )
    kv_groups = clamp("kv_groups", config.kv_groups or by_default[1], max(1, keys), "as many keys")
    cells = query_groups * kv_groups
    if cells >= MANY_CELLS and cells * CELL_COST > queries * keys:
        notes.append(
            f"{query_groups} query groups x {kv_groups} K/V groups are {cells} cells for {queries * keys} "
            "pairs: choosing among them may take longer than dense attention; leave query_groups and "
            "kv_groups out"
        )
    key_rank = clamp("key_rank", config.key_rank, head_dim, "the head dim")
    query_rank = clamp("query_rank", config.query_rank, head_dim, "the head dim")
    probes = 0
    if config.takes_probes:
        affordable = int(config.density * call.q.shape[2] / 2)
        probes = clamp("probes", config.probes, affordable, "half of the pair budget")
        probes = clamp("probes", probes, queries, "as many queries")
    residual_rank = clamp("residual_rank", config.residual_rank, value_dim, "the values' head dim")
    if probes:
        residual_rank = clamp("residual_rank", residual_rank, probes, "as many probes")
    slots = min(kv_groups, config.summary_slots or slots_by_default)
    wanted = rank_by_default if config.drift_rank is None else config.drift_rank
    drift_rank = clamp("drift_rank", wanted, head_dim, "the head dim")
    single = slots if slots == kv_groups else slots // 2
    return Sizes(
        query_groups, kv_groups, key_rank, query_rank, min(config.metric_rows, queries),
        config.metric_spacing, probes, residual_rank, single, slots - single, drift_rank, tuple(notes),
    )  # fmt: skip

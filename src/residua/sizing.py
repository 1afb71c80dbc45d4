"""The numbers of one call: what a Config asks for, cut to what the tensors allow, with a note per cut."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config
from .types import Call

QUERIES_PER_GROUP = 252  # what the authors ran: 300 query and 1000 K/V groups at 75,600 tokens
KEYS_PER_GROUP = 76
LEAST_QUERY_GROUPS = 64  # short calls need finer groups than that (docs/decisions/0002-group-counts.md),
LEAST_KV_GROUPS = 128
LEAST_QUERIES_PER_GROUP = 64  # but not so fine that a group is smaller than a kernel tile,
LEAST_KEYS_PER_GROUP = 32
SLOTS = (64, 128)  # extra keys of a query group in short calls, and in those with more tokens than this:
SHORT_CALL = 16383
FEWEST_GROUPS = (4, 8)  # unless there is next to nothing to choose from


@dataclass(frozen=True)
class Sizes:
    query_groups: int
    kv_groups: int
    key_rank: int
    query_rank: int
    metric_rows: int
    probes: int
    repair_rank: int
    single_slots: int  # extra keys of a query group: for one skipped K/V group each,
    merged_slots: int  # and for all the others
    drift_rank: int
    notes: tuple[str, ...]


def default_groups(queries: int, keys: int) -> tuple[int, int]:
    """Group counts for that many free tokens: in proportion for long calls, finer for short ones."""
    fine_queries = min(LEAST_QUERY_GROUPS, max(FEWEST_GROUPS[0], queries // LEAST_QUERIES_PER_GROUP))
    fine_keys = min(LEAST_KV_GROUPS, max(FEWEST_GROUPS[1], keys // LEAST_KEYS_PER_GROUP))
    return (
        max(1, min(queries, max(fine_queries, round(queries / QUERIES_PER_GROUP)))),
        max(1, min(keys, max(fine_keys, round(keys / KEYS_PER_GROUP)))),
    )


def resolve(config: Config, call: Call) -> Sizes:
    """Clamps every count of the config to the call; each clamp leaves a note for the receipt."""
    notes: list[str] = []

    def clamp(name: str, wanted: int, most: int, why: str) -> int:
        if wanted <= most:
            return wanted
        notes.append(f"{name}={wanted} clamped to {most}: {why}")
        return most

    queries, keys = call.free_queries.count, call.free_keys.count
    head_dim, value_dim = call.q.shape[-1], call.v.shape[-1]
    by_default = default_groups(queries, keys)
    query_groups = clamp(
        "query_groups", config.query_groups or by_default[0], max(1, queries), "as many queries"
    )
    kv_groups = clamp("kv_groups", config.kv_groups or by_default[1], max(1, keys), "as many keys")
    key_rank = clamp("key_rank", config.key_rank, head_dim, "the head dim")
    query_rank = clamp("query_rank", config.query_rank, head_dim, "the head dim")
    probes = 0  # a call that skips nothing, or repairs nothing, needs none
    if config.repair != "none" and (config.density < 1.0 or config.max_error is not None):
        affordable = int(config.density * call.q.shape[2] / 2)
        probes = clamp("probes", config.probes, affordable, "half of the pair budget")
        probes = clamp("probes", probes, queries, "as many queries")
    repair_rank = clamp("repair_rank", config.repair_rank, value_dim, "the values' head dim")
    if probes:
        repair_rank = clamp("repair_rank", repair_rank, probes, "as many probes")
    slots = min(kv_groups, config.tail_slots or SLOTS[queries > SHORT_CALL])
    single = slots if slots == kv_groups else slots // 2
    return Sizes(
        query_groups, kv_groups, key_rank, query_rank, min(config.metric_rows, queries), probes, repair_rank,
        single, slots - single, clamp("drift_rank", config.drift_rank, head_dim, "the head dim"),
        tuple(notes),
    )  # fmt: skip

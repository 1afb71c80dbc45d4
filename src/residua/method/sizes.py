"""Group counts, probes, slots and ranks of a call: what the Config asks for, within what the tensors allow and text
leaves. Exact rows and pinned keys (text tokens) are computed whatever else is skipped."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Config
from ..receipt import Note
from ..types import Call
from .rules import KEYS_PER_GROUP, QUERIES_PER_GROUP, Rules

TINY = 1e-12
# The part of a fixed density that text always leaves for the pairs that may be skipped
# (docs/decisions/0019-text-and-a-fixed-density.md).
LEFT_BY_TEXT = 0.5


def text_share(call: Call) -> Tensor | float:
    """The part of all pairs that exact rows and pinned keys (text tokens) take, whatever else is skipped.

    -> a number, or [B, 1] fp64 under a key mask
    """
    if call.key_mask is None:
        return text_share_by_shapes(call)
    rows, exact = call.q.shape[2], call.exact_queries.count
    pinned = (call.valid_pinned_keys.double() / call.valid_keys.clamp(min=1))[:, None]
    return (exact + (rows - exact) * pinned) / max(1, rows)


def text_share_by_shapes(call: Call) -> float:
    """`text_share` with padding counted as if it were valid: known without waiting for the device."""
    return share_of_text(call.q.shape[2], call.k.shape[2], call.exact_queries.count, call.pinned_keys.count)


def share_of_text(queries: int, keys: int, exact: int, pinned: int) -> float:
    """The part of all pairs that lie in one of the exact rows or hold one of the pinned keys."""
    return (exact + (queries - exact) * pinned / max(1, keys)) / max(1, queries)


def of_whole_call(call: Call, density: Tensor) -> Tensor:
    """A density of the pairs that may be skipped, as a density of the whole call.  # [B, H] fp64"""
    taken = text_share(call)
    return taken + (1 - taken) * density


def of_skippable(call: Call, density: Tensor) -> Tensor:
    """The reverse of `of_whole_call`."""
    taken = text_share(call)
    free = max(1 - taken, TINY) if isinstance(taken, float) else (1 - taken).clamp(min=TINY)
    return (density - taken) / free


def left_by_text(density: float, taken: float) -> float:
    """What a fixed density leaves where text has taken that part of all pairs, as a density of the other pairs."""
    return max(LEFT_BY_TEXT * density, (density - taken) / max(1 - taken, TINY))


def with_text(call: Call, density: Tensor) -> Tensor:
    """What a fixed density allows the whole call: more than `density` if text takes more than half of it.

    density [B, H] -> [B, H] fp64
    """
    if not call.exact_queries.count and not call.pinned_keys.count:
        return density
    return torch.maximum(density, of_whole_call(call, LEFT_BY_TEXT * density))


# Short calls need finer groups (docs/decisions/0002-group-counts.md): at least this many,
MIN_QUERY_GROUPS = 64
MIN_KV_GROUPS = 128
# unless their groups would then be smaller than a kernel tile.
MIN_QUERIES_PER_GROUP = 64
MIN_KEYS_PER_GROUP = 32
# Even the smallest calls have this many groups, so that the router can choose.
SMALLEST_QUERY_GROUPS = 4
SMALLEST_KV_GROUPS = 8
# Probe rows, unless a config names their number. In calls with a summary they take at most this part of the
# budget, as long as there are enough of them.
PROBES = 64
PROBE_SHARE = 1 / 12
MIN_PROBES = 24
ROWS_PER_PROBE = 100  # and at most one of so many rows is a probe
# At least this many heads, and more heads than tokens: the tensor is probably [B, N, H, D].
MANY_HEADS = 256


@dataclass(frozen=True)
class Sizes:
    query_groups: int
    kv_groups: int
    key_rank: int
    query_rank: int
    metric_rows: int
    probes: int
    residual_rank: int
    single_slots: int  # summary keys of a query group that stand for one skipped K/V group each
    merged_slots: int  # summary keys of a query group that share all the other skipped ones
    drift_rank: int
    notes: tuple[Note, ...]


def default_groups(queries: int, keys: int) -> tuple[int, int]:
    """Group counts for that many free tokens: in proportion for long calls, finer for short ones."""
    fine_queries = min(MIN_QUERY_GROUPS, max(SMALLEST_QUERY_GROUPS, queries // MIN_QUERIES_PER_GROUP))
    fine_keys = min(MIN_KV_GROUPS, max(SMALLEST_KV_GROUPS, keys // MIN_KEYS_PER_GROUP))
    return (
        max(1, min(queries, max(fine_queries, round(queries / QUERIES_PER_GROUP)))),
        max(1, min(keys, max(fine_keys, round(keys / KEYS_PER_GROUP)))),
    )


def summary_groups(queries: int, keys: int, density: float, rules: Rules) -> tuple[int, int]:
    """Group counts for that many free tokens where skipped groups are summarised: at ordinary densities near
    the default counts, at low ones finer and by the budget."""
    default_queries, default_keys = default_groups(queries, keys)
    rule = rules.group_rule(queries, keys, density)
    maximum = min(rule.max_query_groups, max(default_queries, queries // rule.queries_each))
    affordable = min(maximum, round(rule.share * (density * queries)))
    fine = (min(count, keys // each) for count, each in rule.kv_groups)
    return max(1, min(queries, max(SMALLEST_QUERY_GROUPS, affordable))), max(default_keys, *fine, 0)


def default_probes(config: Config, queries: int, density: float) -> int:
    """Probe rows of a call with that many query rows; at most half of its budget, `density`."""
    maximum = min(queries, int(density * queries / 2))
    if not config.summarises:
        return min(PROBES, maximum)
    affordable = min(int(PROBE_SHARE * density * queries), queries // ROWS_PER_PROBE)
    return min(PROBES, maximum, max(MIN_PROBES, affordable))


def skippable_density(config: Config, call: Call) -> float:
    """The budget as a density of the pairs that may be skipped: sizes follow what text leaves of it."""
    if config.moves_budget or not config.summarises:
        return config.density
    return left_by_text(config.density, text_share_by_shapes(call))


MANY_CELLS = 1 << 16  # the cost of fewer cells is negligible
CELL_COST = 8  # in pairs: each cell is scored, sorted and perhaps summarised


def fewer_cells(query_groups: int, kv_groups: int, pairs: int) -> tuple[int, int]:
    """Group counts of which choosing among the cells takes no longer than dense attention of that many
    pairs: the larger count is reduced to the smaller one, then both."""
    maximum = max(MANY_CELLS, pairs // CELL_COST)
    if query_groups * kv_groups <= maximum:
        return query_groups, kv_groups
    small = min(query_groups, kv_groups, math.isqrt(maximum))
    large = maximum // small
    return (small, large) if query_groups <= kv_groups else (large, small)


def resolve(config: Config, call: Call, rules: Rules) -> Sizes:
    """Limits every count of the config to what the call allows; each change leaves a note for the receipt."""
    notes: list[Note] = []

    def clamp(name: str, wanted: int, maximum: int, why: str) -> int:
        if wanted <= maximum:
            return wanted
        notes.append(Note(f"{name}={wanted} clamped to {maximum}: {why}"))
        return maximum

    heads, tokens = call.q.shape[1:3]
    if heads >= MANY_HEADS and heads > tokens:
        wanted = "wanted [B, H, N, D]; if yours is [B, N, H, D], pass q.transpose(1, 2), and k and v likewise"
        notes.append(Note(f"q has {heads} heads of {tokens} tokens: {wanted}"))
    density, held = skippable_density(config, call), text_share_by_shapes(call)
    if density <= LEFT_BY_TEXT * config.density:
        taken = f"exact rows and pinned keys take {held:.3f}, more than half of it"
        spent = f"{density:g} of the rest is spent beside them"
        notes.append(Note(f"density is above the target {config.density:g}: {taken}; {spent}"))
    queries, keys = call.free_queries.count, call.free_keys.count
    head_dim, value_dim = call.q.shape[-1], call.v.shape[-1]
    by_default = summary_groups(queries, keys, density, rules) if config.summarises else default_groups(queries, keys)
    summary = rules.summary_rule(queries, density)
    query_groups = clamp("query_groups", config.query_groups or by_default[0], max(1, queries), "as many queries")
    kv_groups = clamp("kv_groups", config.kv_groups or by_default[1], max(1, keys), "as many keys")
    few = fewer_cells(query_groups, kv_groups, queries * keys)
    why = f"more cells than an eighth of the {queries * keys} pairs take longer than dense attention"
    query_groups = clamp("query_groups", query_groups, few[0], why)
    kv_groups = clamp("kv_groups", kv_groups, few[1], why)
    key_rank = clamp("key_rank", config.key_rank, head_dim, "the head dim")
    query_rank = clamp("query_rank", config.query_rank, head_dim, "the head dim")
    probes = 0
    if config.takes_probes and config.probes is None:
        probes = min(default_probes(config, call.q.shape[2], density), queries)
    elif config.takes_probes and config.probes is not None:
        probes = clamp("probes", config.probes, int(density * call.q.shape[2] / 2), "half of the pair budget")
        probes = clamp("probes", probes, queries, "as many queries")
    residual_rank = clamp("residual_rank", config.residual_rank, value_dim, "the values' head dim")
    if probes:
        residual_rank = clamp("residual_rank", residual_rank, probes, "as many probes")
    slots = min(kv_groups, config.summary_slots or summary.slots)
    rank = summary.rank if config.drift_rank is None else config.drift_rank
    drift_rank = clamp("drift_rank", rank, head_dim, "the head dim")
    single = slots if slots == kv_groups else slots // 2
    return Sizes(
        query_groups,
        kv_groups,
        key_rank,
        query_rank,
        min(config.metric_rows, queries),
        probes,
        residual_rank,
        single,
        slots - single,
        drift_rank,
        tuple(notes),
    )

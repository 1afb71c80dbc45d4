"""Everything that differs between kinds of device: what the host may do while a call runs, and the sizes that
were found best there. Chosen once per call; no later stage looks at a device.

`CPU` and `GPU` run on any device: `Config(rules="gpu")` computes on a CPU what a GPU would compute.
"""

import math
from dataclasses import dataclass

from ..config import Config
from ..ops.select import rules_for
from ..types import Call

# Below this density most of the output comes from the summary: groups are finer, and a fixed part of the
# budget pays for them (docs/decisions/0011-sizes-by-budget.md).
LOW = 0.15
QUERIES_PER_GROUP = 252  # what the authors ran: 300 query and 1000 K/V groups at 75,600 tokens
KEYS_PER_GROUP = 76


@dataclass(frozen=True)
class GroupRule:
    """Group counts of calls that summarise what they skip and are below every limit. `rows` are the full query
    rows that the budget pays for; each such row pays for `share` query groups."""

    rows: float = math.inf
    density: float = math.inf
    keys: float = math.inf
    share: float = 1.0
    max_query_groups: int = 1 << 30
    queries_each: int = QUERIES_PER_GROUP  # on average, unless the default counts are higher
    kv_groups: tuple[tuple[int, int], ...] = ()  # at least so many, if each has so many keys on average


@dataclass(frozen=True)
class SummaryRule:
    """Summary keys per query group and rank of their drift, in calls that reach every limit."""

    slots: int
    rank: int
    rows: float = 0.0
    density: float = 0.0
    queries: int = 0


@dataclass(frozen=True)
class Rules:
    """How the method runs on one kind of device."""

    name: str
    # Whether the host may wait for what the device found. Then it asks which heads drop their summary, which
    # groups no longer fit and what is not finite, and computes only what these need; otherwise every case is
    # computed, and the number of calls decides how long groups are kept.
    host_may_wait: bool
    # Whether neighbours that share merged slots share their covariances: as accurate, and far less to mix. A
    # GPU has no use for it: there a product with the covariances of all groups is quick.
    pools_covariances: bool
    # Whether the centre of a group weighs its keys by the mean query, for which it is then exact, and whether
    # centres drift. A GPU, which launches as little as it can, does without both.
    weighs_centres: bool
    drifts_centres: bool
    adds_in_order: bool  # whether adding by index has the same order every time
    priority_keys: int | None  # keys of a group from which its priority is measured; None: every fourth
    groups: tuple[GroupRule, ...]  # the first whose limits hold
    summary: tuple[SummaryRule, ...]  # the first whose limits hold

    def group_rule(self, queries: int, keys: int, density: float) -> GroupRule:
        """The first rule for a call with that many free tokens."""
        rows = density * queries
        return next(r for r in self.groups if rows < r.rows and density < r.density and keys <= r.keys)

    def summary_rule(self, queries: int, density: float) -> SummaryRule:
        """The first rule for a call with that many free queries."""
        rows = density * queries
        return next(r for r in self.summary if rows >= r.rows and density >= r.density and queries >= r.queries)


CPU = Rules(
    name="cpu",
    host_may_wait=True,
    pools_covariances=True,
    weighs_centres=True,
    drifts_centres=True,
    adds_in_order=True,
    priority_keys=None,
    groups=(
        # few rows: centres of many small groups do better than few anchors (docs/decisions/0021-centres.md)
        GroupRule(rows=300, share=3 / 4, max_query_groups=96, queries_each=32, kv_groups=((512, 8),)),
        # concentrated heads of short calls need fine groups (docs/decisions/0016-concentrated-heads.md)
        GroupRule(density=LOW, keys=4096, share=1 / 5, queries_each=126, kv_groups=((512, 8),)),
        GroupRule(density=LOW, share=1 / 5, queries_each=126, kv_groups=((512, 32), (256, 16))),
        GroupRule(share=1 / 5, kv_groups=((256, 16),)),
    ),
    # docs/decisions/0020-groups-that-share-a-slot.md
    summary=(
        SummaryRule(128, 32, rows=640),
        SummaryRule(96, 32, rows=480),
        SummaryRule(64, 16, rows=300),
        SummaryRule(48, 16, rows=230),
        SummaryRule(32, 16, rows=180),
        SummaryRule(32, 8, rows=100),
        SummaryRule(16, 0),
    ),
)

GPU = Rules(
    name="gpu",
    host_may_wait=False,
    pools_covariances=False,
    weighs_centres=False,
    drifts_centres=False,
    adds_in_order=False,
    priority_keys=6,  # a GPU counts the bytes that it reads
    groups=(
        # covariances are computed group by group, so anchors are expensive
        GroupRule(density=LOW, share=1 / 8, queries_each=126, kv_groups=((512, 32),)),
        GroupRule(),
    ),
    # a drift of rank 32 does not fit the registers of the kernels
    summary=(
        SummaryRule(128, 16, density=LOW, queries=16384),
        SummaryRule(64, 16, density=LOW),
        SummaryRule(128, 16, rows=640),
        SummaryRule(64, 16, rows=363),
        SummaryRule(32, 16),
    ),
)

RULES = {rules.name: rules for rules in (CPU, GPU)}


def choose_rules(config: Config, call: Call) -> Rules:
    """The rules that the config names, or those of the device that holds the call."""
    return RULES[rules_for(call.q.device) if config.rules == "auto" else config.rules]

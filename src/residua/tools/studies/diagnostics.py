"""`residua analyze`: the paper's structural observations (section 3), measured on captured calls.

O1  how many keys a row needs, and how many a group of rows with the same route needs
O2  the attention mass that a route keeps, and the error of its output
O3  how much of the missing part is an affine function of the sparse output

Nothing of size Nq x Nk is ever in memory: rows are processed in blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from ...config import Config
from ...types import Partition
from ..capture.captures import CapturedCall
from ..reports import figure
from ..reports.page import Finding, Page, Picture
from ..reports.table import Table, share
from .study import Watch, decided, make_page, models_of, some, watched
from .subject import CHUNK_PAIRS, Sparse, Subject

PARTITIONS = ("semantic", "response")
MASS, MEMBERS = 0.9, 8  # for O1: the mass that keys must hold, and the number of rows that pool their keys
IDENTITY_ROWS = 128
DENSITIES = (0.12, 0.22, 0.35)
MARGIN = 0.005  # a smaller effect, or one that most calls do not show, decides nothing
ALIKE = 0.1  # routes are compared if their omitted masses differ by less than this share


@dataclass(frozen=True)
class Support:
    """O1 for one partition. Densities are shares of all keys."""

    partition: str
    rowwise: Tensor  # [groups] median of tau_i over the sampled rows of a group
    pooled: Tensor  # [groups] gamma_a^(m)
    rows: Tensor  # [groups * m] tau_i

    @property
    def row_median(self) -> float:
        return float(self.rows.median())

    @property
    def pooled_median(self) -> float:
        return float(self.pooled.median())

    @property
    def points(self) -> list[tuple[float, float]]:
        """Support of a row and pooled support of each group that has rows."""
        both = zip(self.rowwise.tolist(), self.pooled.tolist(), strict=True)
        return [(row, pooled) for row, pooled in both if row == row]


@dataclass(frozen=True)
class Fidelity:
    """O2 for one partition at one density, over the rows that are routed."""

    partition: str
    target: float
    density: float  # realised, routed pairs
    retained: float  # mean attention mass that is kept
    mean: float
    p99: float
    identity: float  # largest |R - p_U (O_U - O_sp)| / |O_dense| of the checked rows


@dataclass(frozen=True)
class Affine:
    """O3 for one partition: energies of the residual R = O_dense - O_sp."""

    partition: str
    density: float
    energy: float  # |R|^2
    orthogonal: float  # |(I - P_X) R|^2

    @property
    def explained(self) -> float:
        return 1.0 - self.orthogonal / self.energy if self.energy > 0 else 1.0


def row_support(weights: Tensor, mass: float) -> Tensor:
    """The smallest sets of heaviest keys that hold `mass`; ties go to the lower index.

    weights [n, Nk], rows that sum to one -> bool [n, Nk]
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, before < mass)


def sample_members(partition: Partition, members: int, max_groups: int) -> Tensor:
    """`members` evenly spaced rows of each group that has that many; at most `max_groups` evenly spaced
    groups.  # [groups, members] int64"""
    sizes, offsets, order = partition.sizes[0, 0], partition.offsets[0, 0], partition.order[0, 0]
    groups = (sizes >= members).nonzero()[:, 0]
    if len(groups) > max_groups:
        groups = groups[torch.arange(max_groups) * len(groups) // max_groups]
    places = torch.arange(members) * sizes[groups, None] // members
    return order[offsets[groups, None] + places]


def support(subject: Subject, partition: str, mass: float = 0.9, members: int = 8, max_groups: int = 64) -> Support:
    """O1: tau_i of sampled rows, and gamma of the groups they were sampled from."""
    call = subject.call
    grouping = subject.group(subject.config.replace(partition=partition))
    rows = sample_members(grouping.query, members, max_groups)  # [groups, m]
    taus, gammas = [], []
    at_once = max(1, CHUNK_PAIRS // (members * call.k.shape[2]))
    for block in rows.split(at_once):
        scores = call.scale * call.q[0, 0, block.flatten()] @ call.k[0, 0].mT  # [groups * m, Nk]
        held = row_support(scores.double().softmax(-1), mass).unflatten(0, block.shape)  # [groups, m, Nk]
        taus.append(held.double().mean(-1))
        gammas.append(held.any(1).double().mean(-1))
    tau = torch.cat(taus) if taus else torch.full((1, members), torch.nan).double()
    pooled = torch.cat(gammas) if gammas else torch.full((1,), torch.nan).double()
    return Support(partition, tau.median(-1).values, pooled, tau.flatten())


def fidelity(subject: Subject, partition: str, density: float) -> Fidelity:
    """O2 for hard drop (softmax over the kept keys only)."""
    sparse = subject.sparse(subject.config.replace(partition=partition, density=density))
    retained = (sparse.lse - subject.dense_lse)[0, 0, subject.rows].double().exp().clamp(max=1.0)
    mean, p99 = subject.errors(sparse.out)
    gap = identity_gap(subject, sparse)
    return Fidelity(partition, density, sparse.density, float(retained.mean()), mean, p99, gap)


def identity_gap(subject: Subject, sparse: Sparse, rows: int = IDENTITY_ROWS) -> float:
    """Checks R = p_U (O_U - O_sp) on evenly spaced rows: the left side from the outputs of the operator and
    of dense attention, the right side from the omitted keys alone, in fp64."""
    call, free = subject.call, subject.rows
    chosen = free[torch.arange(min(rows, len(free))) * len(free) // min(rows, len(free))]
    worst = 0.0
    for block in chosen.split(max(1, CHUNK_PAIRS // (4 * call.k.shape[2]))):
        scores = call.scale * call.q[0, 0, block].double() @ call.k[0, 0].double().mT  # [n, Nk]
        group = sparse.grouping.query.labels[0, 0, block]
        skipped = sparse.omitted[group][:, sparse.grouping.kv.labels[0, 0]]  # [n, Nk]
        weights = torch.where(skipped, scores.softmax(-1), 0.0)
        missing = weights.sum(-1, keepdim=True)  # p_U
        skipped_out = weights @ call.v[0, 0].double() / missing.clamp(min=torch.finfo(torch.float64).tiny)
        sparse_out, dense = sparse.out[0, 0, block].double(), subject.dense[0, 0, block].double()
        gap = (dense - sparse_out) - missing * (skipped_out - sparse_out)
        worst = max(worst, float((gap.norm(dim=-1) / dense.norm(dim=-1).clamp(min=1e-30)).max()))
    return worst


def affine(subject: Subject, partition: str) -> Affine:
    """O3: the oracle projection of the residual on [1, O_sp], over all routed rows."""
    sparse = subject.sparse(subject.config.replace(partition=partition))
    x = sparse.out[0, 0, subject.rows].double()
    residual = subject.dense[0, 0, subject.rows].double() - x
    features = torch.cat([torch.ones_like(x[:, :1]), x], -1)  # [n, 1 + Dv]
    basis, strength, _ = torch.linalg.svd(features, full_matrices=False)
    basis = basis[:, strength > 1e-12 * strength.max()]
    outside = residual - basis @ (basis.mT @ residual)
    return Affine(partition, sparse.density, float(residual.square().sum()), float(outside.square().sum()))


@dataclass(frozen=True)
class Observed:
    """One call with its three observations."""

    captured: CapturedCall
    supports: dict[str, Support]
    fidelities: list[Fidelity]
    affines: dict[str, Affine]

    @property
    def energy_ratio(self) -> float:
        """The energy outside the affine space with response-coupled groups over that with semantic ones."""
        return self.affines["response"].orthogonal / self.affines["semantic"].orthogonal

    def to_dict(self) -> dict[str, Any]:
        call = {"model": self.captured.model, "call": self.captured.name, "tokens": self.captured.tokens}
        medians = ("row_median", "pooled_median")
        return call | {
            "support": {name: {x: getattr(found, x) for x in medians} for name, found in self.supports.items()},
            "fidelity": [vars(found) for found in self.fidelities],
            "affine": {name: {**vars(found), "explained": found.explained} for name, found in self.affines.items()},
        }


@torch.no_grad()
def observe(captured: CapturedCall, config: Config, densities: Sequence[float], groups: int) -> Observed:
    """The three observations of one call; O1 uses at most `groups` query groups."""
    subject = Subject(captured, config)
    return Observed(
        captured,
        {name: support(subject, name, MASS, MEMBERS, groups) for name in PARTITIONS},
        [fidelity(subject, name, density) for name in PARTITIONS for density in densities],
        {name: affine(subject, name) for name in PARTITIONS},
    )


def analyze(
    calls: Sequence[CapturedCall], config: Config, command: str, quick: bool = False, watch: Watch | None = None
) -> Page:
    """Observes every call (a few with `quick`) and writes the report."""
    chosen = some(calls, quick)
    densities = tuple(sorted({config.density} if quick else {*DENSITIES, config.density}))
    found = [observe(captured, config, densities, 16 if quick else 64) for captured in watched(chosen, watch)]
    return make_page(
        chosen,
        calls,
        config,
        [],
        findings(found),
        title="Structure of captured attention",
        lead="How many keys a row needs and how many a shared route needs, what the kept mass says about the "
        "error, and how much of the missing part an affine map can restore.",
        command=command,
        tables=[support_table(found), fidelity_table(found), affine_table(found), call_table(found)],
        pictures=pictures(found),
        data={"calls": [item.to_dict() for item in found], "config": config.to_dict()},
    )


def per_model(found: Sequence[Observed]) -> dict[str, list[Observed]]:
    return {model: [x for x in found if x.captured.model == model] for model in models_of([x.captured for x in found])}


def support_table(found: Sequence[Observed]) -> Table:
    medians = {}
    for model, items in per_model(found).items():
        for name in PARTITIONS:
            supports = [item.supports[name] for item in items]
            row = float(torch.cat([support.rows for support in supports]).nanmedian())
            medians[f"{model}, {name} groups"] = row, float(torch.cat([s.pooled for s in supports]).nanmedian())
    return Table.filled(
        f"O1: keys that hold {MASS:.0%} of the mass, share of all keys (median)",
        "model, groups",
        list(medians),
        {
            "one row": [share(row) for row, _ in medians.values()],
            f"{MEMBERS} rows of a group": [share(pooled) for _, pooled in medians.values()],
            "expansion": [f"{pooled / row:.2f}" for row, pooled in medians.values()],
        },
        f"{MEMBERS} evenly spaced rows of each sampled query group; pooled is the union of their keys.",
    )


def fidelity_table(found: Sequence[Observed]) -> Table:
    cells: dict[tuple[str, str, float], list[Fidelity]] = {}
    for item in found:
        for one in item.fidelities:
            cells.setdefault((item.captured.model, one.partition, one.target), []).append(one)

    def means(name: str) -> list[float]:
        return [fmean(getattr(one, name) for one in ones) for ones in cells.values()]

    return Table.filled(
        "O2: kept mass and error of hard drop",
        "model, groups",
        [f"{model}, {partition} groups" for model, partition, _ in cells],
        {
            "target": [share(target, 0) for _, _, target in cells],
            "routed pairs": [share(mean) for mean in means("density")],
            "kept mass": [share(mean) for mean in means("retained")],
            "mean error": [f"{mean:.4f}" for mean in means("mean")],
            "p99 error": [f"{mean:.4f}" for mean in means("p99")],
            "identity, worst gap": [f"{max(one.identity for one in ones):.1e}" for ones in cells.values()],
        },
        "The last column checks R = p_U (O_U - O_sp) in fp64 against the operator's fp32 outputs, relative "
        "to the row's dense output.",
    )


def affine_table(found: Sequence[Observed]) -> Table:
    models = per_model(found)
    semantic, response = (
        [fmean(item.affines[name].explained for item in items) for items in models.values()] for name in PARTITIONS
    )
    ratios = [[item.energy_ratio for item in items] for items in models.values()]
    return Table.filled(
        "O3: the residual as an affine function of the sparse output (oracle)",
        "model",
        list(models),
        {
            "explained, semantic": [share(explained) for explained in semantic],
            "explained, response": [share(explained) for explained in response],
            "points": [f"{100 * (after - before):+.1f}" for before, after in zip(semantic, response, strict=True)],
            "orthogonal energy, response / semantic (median)": [f"{median(each):.3f}" for each in ratios],
            "calls below 1": [f"{sum(ratio < 1 for ratio in each)} of {len(each)}" for each in ratios],
        },
        "Same group counts, routing rule and routed pairs for both partitions; fractions: means over calls.",
    )


def call_table(found: Sequence[Observed]) -> Table:
    return Table.filled(
        "Call by call",
        "call",
        [str(item.captured) for item in found],
        {
            "row": [share(item.supports["semantic"].row_median) for item in found],
            **{f"pooled, {name}": [share(x.supports[name].pooled_median) for x in found] for name in PARTITIONS},
            **{f"affine, {name}": [share(x.affines[name].explained) for x in found] for name in PARTITIONS},
            "orthogonal ratio": [f"{item.energy_ratio:.3f}" for item in found],
        },
    )


def pictures(found: Sequence[Observed]) -> list[Picture]:
    models = per_model(found)

    def supports(items: Sequence[Observed], partition: str) -> list[tuple[float, float]]:
        return [point for item in items for point in item.supports[partition].points]

    points = {name: {model: supports(items, name) for model, items in models.items()} for name in PARTITIONS}
    drawn = []
    if all(pairs for of_model in points.values() for pairs in of_model.values()):
        caption = (
            f"A point is a query group: the median share of keys that one of its rows needs for {MASS:.0%} of its "
            f"mass, and the share that {MEMBERS} of its rows need together. On the dashed line all rows need the same "
            "keys."
        )
        title = "Support of rows and of groups of rows"
        drawn.append(Picture("support", title, caption, figure.support_scatter(points)))
    errors = {model: [(1 - one.retained, one.p99) for one in _semantic(items)] for model, items in models.items()}
    caption = "A point is a call at one density, semantic groups, hard drop. Equal mass is not equal error."
    drawn.append(Picture("mass", "Skipped mass against p99 error", caption, figure.mass_against_error(errors)))
    return drawn


def _semantic(found: Sequence[Observed]) -> list[Fidelity]:
    return [one for item in found for one in item.fidelities if one.partition == "semantic"]


def findings(found: Sequence[Observed]) -> list[Finding]:
    expansions = [item.supports["semantic"].pooled_median / item.supports["semantic"].row_median for item in found]
    worst = max(one.identity for item in found for one in item.fidelities)
    middle = median(expansions)
    expanded = f"median expansion {middle:.2f}, from {min(expansions):.2f} to {max(expansions):.2f}"
    largest = f"largest relative gap {worst:.1e}, fp32 outputs"
    return [
        Finding("O1: a shared route needs more keys than its rows", middle > 1.0, expanded),
        Finding("O2: routes that keep the same mass differ in their error", *_unlike(found)),
        Finding("O2: R = p_U (O_U - O_sp)", worst < 1e-4, largest, any_length=True),
        *_affine_findings(found),
    ]


def _affine_findings(found: Sequence[Observed]) -> list[Finding]:
    """Decided per model, as in the paper: the mean of fractions, the median of energy ratios."""
    explained, energy = {}, {}
    for model, items in per_model(found).items():
        pairs = [(item.affines["semantic"], item.affines["response"]) for item in items]
        explained[model] = [after.explained - before.explained for before, after in pairs]
        energy[model] = [1 - item.energy_ratio for item in items]
    more, less = "response-coupled groups leave a more affine residual", "and less energy outside the affine space"
    return [
        _over_models(f"O3: {more}", explained, fmean, lambda gain: f"{100 * gain:+.1f} points, up"),
        _over_models(f"O3: {less}", energy, median, lambda gain: f"x {1 - gain:.3f}, down"),
    ]


def _over_models(
    claim: str, gains: Mapping[str, Sequence[float]], middle: Callable[..., float], shown: Callable[[float], str]
) -> Finding:
    """Whether the gains of each model are above zero, by a margin in the middle and in most calls. Gains that are not,
    and are not below zero either, decide nothing."""
    holds: list[bool | None] = []
    evidence = []
    for model, values in gains.items():
        gain, above, below = middle(values), sum(x > 0 for x in values), sum(x < 0 for x in values)
        clear = (gain > MARGIN and 2 * above > len(values)), (gain < -MARGIN and 2 * below > len(values))
        holds.append(clear[0] if any(clear) else None)
        evidence.append(f"{model} {shown(gain)} in {above} of {len(values)}")
    if all(answer is None for answer in holds):
        within = f"{', '.join(evidence)}; within {share(MARGIN)}"
        return Finding(claim, None, within, instead="no clear difference")
    return decided(claim, holds, ", ".join(evidence))


def _unlike(found: Sequence[Observed]) -> tuple[bool | None, str]:
    """The largest ratio of p99 errors between two routes that keep about the same mass."""
    best, pair = 1.0, None
    for one, other in product(_semantic(found), repeat=2):
        omitted, others = 1 - one.retained, 1 - other.retained
        alike = abs(omitted - others) <= ALIKE * min(omitted, others)
        if alike and one.p99 > best * other.p99 > 0:
            best, pair = one.p99 / other.p99, (one, other)
    if pair is None:
        return None, "no two routes keep about the same mass"
    text = (
        f"p99 {pair[0].p99:.4f} and {pair[1].p99:.4f} at {share(pair[0].retained, 2)} and "
        f"{share(pair[1].retained, 2)} of the mass, {best:.1f} times"
    )
    return best > 1.5, text

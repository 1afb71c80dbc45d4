"""The paper's structural observations (section 3), measured on one captured call.

O1  how many keys a row needs, and how many a group of rows with the same route needs
O2  the attention mass that a route keeps, and the error of its output
O3  how much of the missing part is an affine function of the sparse output

Nothing of size Nq x Nk is ever in memory: rows are processed in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....config import Config
from ....types import Partition
from ...capture.captures import CapturedCall
from ..subject import CHUNK_PAIRS, Sparse, Subject

PARTITIONS = ("semantic", "response")
MASS, MEMBERS = 0.9, 8  # for O1: the mass that keys must hold, and the number of rows that pool their keys
IDENTITY_ROWS = 128


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
    return Fidelity(
        partition, density, sparse.density, float(retained.mean()), mean, p99, identity_gap(subject, sparse)
    )


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

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.captured.model,
            "call": self.captured.name,
            "tokens": self.captured.tokens,
            "support": {
                name: {"row_median": found.row_median, "pooled_median": found.pooled_median}
                for name, found in self.supports.items()
            },
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

"""What a study looks at: one captured call, dense attention as the reference, and the stages of the method as
separate pieces that can be exchanged."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...api import attention
from ...config import Config
from ...method.grouping.partition import group_tokens
from ...method.judge import choose_rows, coverage_weights
from ...method.reconstructions import apply_fit
from ...method.route import pair_budget, route_cells
from ...method.sizes import Sizes
from ...method.stages import SizedCall
from ...ops.backend import Backend, Demand
from ...ops.select import choose_backend
from ...receipt import Receipt
from ...types import Call, Grouping, Probes, Route
from ..capture.captures import CapturedCall
from ..metrics.row_error import row_errors

CHUNK_PAIRS = 1 << 24  # for a block of rows against all keys: 64 MiB of scores, whatever N is


@dataclass(frozen=True)
class Sparse:
    """A call with some cells skipped and nothing reconstructed."""

    grouping: Grouping
    route: Route
    out: Tensor  # [1, 1, Nq, Dv] fp32
    lse: Tensor  # [1, 1, Nq] fp32, of the kept keys
    density: float  # routed pairs over all pairs
    allowed: float  # what the target leaves for them; every query group keeps a cell, whatever that costs

    @property
    def omitted(self) -> Tensor:
        """Whether each K/V group is skipped by each query group.  # [Cq, Ck] bool"""
        return ~self.route.cells[0, 0]


class Subject:
    """A loaded captured call. Groupings and sparse outputs are kept for the next variant."""

    def __init__(self, captured: CapturedCall, config: Config) -> None:
        self.captured = captured
        self.config = config
        self.call: Call = captured.call()
        self.backend: Backend = choose_backend(config.backend, Demand.of(self.call))
        self._groupings: dict[Config, Grouping] = {}
        self._sparse: dict[Config, Sparse] = {}

    @cached_property
    def _dense(self) -> tuple[Tensor, Tensor]:
        return dense_rows(self.call)

    @property
    def dense(self) -> Tensor:
        """Attention of every row against every key.  # [1, 1, Nq, Dv] fp32"""
        return self._dense[0]

    @property
    def dense_lse(self) -> Tensor:
        return self._dense[1]  # [1, 1, Nq] fp32

    @cached_property
    def rows(self) -> Tensor:
        """Query rows that are routed: all except text.  # [free] int64"""
        return self.call.free_queries.index(self.call.q.device)

    def group(self, config: Config, start: tuple[Tensor, Tensor] | None = None) -> Grouping:
        """Groups from a cold start, or from the centroids (queries, keys) of another call."""
        sized = SizedCall.of(self.call, config, self.backend)
        if start is not None:
            return group_tokens(sized, start)
        # settings that do not change the groups
        other = {"probes": 0, "summary_slots": None, "drift_rank": 0, "max_error": None, "balance": False}
        key = config.replace(density=1.0, reconstruction="none", **other)
        if key not in self._groupings:
            self._groupings[key] = group_tokens(sized)
        return self._groupings[key]

    def sizes(self, config: Config) -> Sizes:
        """What the config comes to for this call."""
        return SizedCall.of(self.call, config, self.backend).sizes

    def sparse(self, config: Config, grouping: Grouping | None = None) -> Sparse:
        """Routed attention. The cost of the probes is always subtracted, whether or not a reconstruction
        follows, so that all variants evaluate the same number of routed pairs."""
        if grouping is None and config in self._sparse:
            return self._sparse[config]
        groups = self.group(config) if grouping is None else grouping
        sized = SizedCall.of(self.call, config, self.backend)
        probes, route = sized.sizes.probes, route_cells(sized.grouped(groups)).route
        out, lse = self.backend.attend(
            self.call.q, self.call.k, self.call.v, route, self.call.scale, out_dtype=torch.float32
        )
        call = self.call
        possible = call.q.shape[2] * call.k.shape[2]
        allowed = int(pair_budget(call, config.density, probes)) + call.free_queries.count * call.pinned_keys.count
        found = Sparse(groups, route, out, lse, float(route.pairs.sum()) / possible, allowed / possible)
        if grouping is None:
            self._sparse[config] = found
        return found

    def probes(self, grouping: Grouping, count: int, policy: str, seed: int = 0) -> Probes:
        """Probe rows placed by a policy of the operator; their exact outputs are taken from the dense
        reference."""
        labels = self.call.free_queries.take(grouping.query.labels, 2)
        # only this policy takes a seed
        generator = torch.Generator().manual_seed(seed) if policy == "random" else None
        where = (grouping.coordinates, labels, grouping.query.groups)
        order, backend = self.config.probe_order, self.backend
        rows, weights = choose_rows(*where, count, policy, generator, order=order, backend=backend)
        return self.at(self.rows[rows], weights)

    def at(self, rows: Tensor, weights: Tensor) -> Probes:
        return Probes(rows, weights, torch.take_along_dim(self.dense, rows[..., None], dim=2))

    def attend(self, config: Config) -> tuple[Tensor, Receipt]:
        """The whole call through `residua.attention`, cold."""
        call, text, rows = self.call, self.captured.text, self.captured.text_queries
        return attention(
            call.q, call.k, call.v, config, pinned_keys=text, exact_queries=rows, scale=call.scale, return_receipt=True
        )

    def weights(self, grouping: Grouping, rows: Tensor) -> Tensor:
        """Coverage weights of rows [1, 1, M] under a grouping."""
        return coverage_weights(rows, grouping.query.labels, grouping.query.groups)

    def reconstruction(self, sparse: Sparse, probes: Probes, rank: int, ridge: float, subspace: bool = True) -> Tensor:
        """The reconstructed output.  # [1, 1, Nq, Dv] fp32"""
        missed, x = probes.residual(sparse.out)
        fit = self.backend.fit_residual(x, missed, probes.weights, rank, ridge, subspace)
        return apply_fit(sparse.out.clone(), fit, probes, torch.float32, self.backend)

    def errors(self, out: Tensor, *probed: Probes) -> tuple[float, float]:
        """Mean and p99 of the relative row error, over routed rows that are not in any of the probe sets."""
        return self.errors_at(out, *(probes.rows.flatten() for probes in probed))

    def errors_at(self, out: Tensor, *left_out: Tensor) -> tuple[float, float]:
        """The same without the given rows [n]."""
        text = self.call.exact_queries.index(self.call.q.device)
        rows = torch.cat([text, *left_out]).unique()
        return row_errors(out, self.dense, rows[None, None])


def dense_rows(call: Call, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Dense attention of some query rows (default: all), block by block: out [1, 1, n, Dv] and log-sum-exp
    [1, 1, n], fp32."""
    q = call.q if rows is None else call.q[:, :, rows]
    outs, sums = [], []
    for part in q.split(max(1, CHUNK_PAIRS // call.k.shape[2]), dim=2):
        scores = call.scale * part @ call.k.mT  # [1, 1, n, Nk]
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp() @ call.v)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)

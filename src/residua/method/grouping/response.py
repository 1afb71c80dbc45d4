"""Response coordinates: keys are compared by how sampled queries respond to them, queries by how they respond
to the key groups (the paper's section 4.1 and appendix B)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.backend import Backend
from ...util.golden import golden_indices
from ..rules import Rules


@dataclass(frozen=True)
class Space:
    """Where tokens are compared: their activations, or a linear map of them, perhaps brought to the same RMS."""

    factor: Tensor | None  # [B, H, D, R] fp32; None: the activations themselves
    normalise: bool
    backend: Backend
    rough: bool = False  # whether nobody but k-means reads the coordinates

    def coordinates(self, rows: Tensor) -> Tensor:
        """Rows [B, H, N, D] in this space.  # [B, H, N, R] fp32"""
        if self.factor is None:
            return rows.float()
        return self.backend.project(rows, self.factor, self.normalise, rough=self.rough)


def evenly_spaced(count: int, total: int, device: torch.device) -> Tensor:
    """`count` ascending indices spread over range(total), without a random generator.  # [count]"""
    return torch.arange(count, device=device) * total // max(1, count)


def key_metric(q: Tensor, rows: int, spacing: str, backend: Backend) -> Tensor:
    """M_K = Q_s^T Q_s / M_s over `rows` query rows (all if there are fewer), spaced as
    `Config.metric_spacing` says.

    q [..., N, D] -> [..., D, D] fp64. Rows with NaN or Inf are left out: they would spoil every group.
    """
    total = q.shape[-2]
    place = golden_indices if spacing == "golden" else evenly_spaced
    index = place(min(rows, total), total, q.device).expand(*q.shape[:-2], -1)
    return backend.second_moment(backend.gather_rows(q, index), None, centred=False)


def query_metric(centroids: Tensor, sizes: Tensor, backend: Backend) -> Tensor:
    """M_Q = K~^T K~ / (C+ D): non-empty groups only, centred by their uniform mean, each with equal weight.

    centroids [..., Ck, D], sizes [..., Ck] -> [..., D, D] fp64
    """
    return backend.second_moment(centroids, sizes > 0, centred=True) / centroids.shape[-1]


def metric_factor(metric: Tensor, rank: int, rules: Rules, backend: Backend) -> Tensor:
    """Leading eigenvectors, scaled by the root of their eigenvalues, which are normalised to unit mean first.

    metric [..., D, D] -> [..., D, rank] fp32, rank <= D
    """
    return backend.leading_factor(metric, rank, exact=rules.host_may_wait)

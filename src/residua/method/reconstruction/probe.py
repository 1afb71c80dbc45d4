"""Probe-fitted residual reconstruction, the paper's: a weighted affine map from the sparse output to what it
misses, fitted on exact probe rows (the paper's section 4.2, appendix A). The fit itself is the primitive
`Backend.fit_residual`; in plain torch it stands in `ops/residual.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.backend import Backend
from ...types import Probes, ResidualFit, SummaryKeys
from ..probes import take_probes
from ..row_error import weighted_error
from ..stages import GroupedCall, Routing, Verdict
from .base import RECONSTRUCTIONS, Reconstruction
from .dtypes import narrow, wide_enough


@RECONSTRUCTIONS.register
class ProbeFit(Reconstruction):
    """Section 4.2 of the paper."""

    name = "probe"
    about = "the paper's: an affine map of the sparse output, fitted on exact probe rows"
    probe_policy = "stratified"

    def judge(self, grouped: GroupedCall, routing: Routing, summary: SummaryKeys | None) -> Verdict:
        count = grouped.sizes.probes
        if not count:
            return Verdict(routing.route)
        config = grouped.config
        probes = take_probes(
            grouped.call, grouped.grouping, count, self.policy(config), config.probe_order, grouped.backend
        )
        return Verdict(routing.route, probes=probes)

    def output_dtype(self, grouped: GroupedCall) -> torch.dtype:
        return torch.float32 if grouped.sizes.probes else grouped.call.q.dtype

    def finish(self, grouped: GroupedCall, verdict: Verdict, out: Tensor) -> tuple[Tensor, Tensor | None]:
        probes, config, sizes = verdict.probes, grouped.config, grouped.sizes
        if probes is None:
            return out, None
        missed, x = probes.residual(out)
        fit = grouped.backend.fit_residual(
            x, missed, probes.weights, sizes.residual_rank, config.ridge, config.subspace
        )
        out = apply_fit(out, fit, probes, grouped.call.q.dtype, grouped.backend)
        # one probe alone is met exactly and says nothing about the others
        return out, estimate_error(fit, probes) if sizes.probes > 1 else None


def apply_fit(out: Tensor, fit: ResidualFit, probes: Probes, dtype: torch.dtype, backend: Backend) -> Tensor:
    """Corrects the sparse output [B, H, Nq, Dv] fp32 in one pass and puts the exact probe rows in place."""
    out = backend.add_affine(out, fit.left, fit.right, fit.bias, wide_enough(dtype))
    return probes.put(narrow(out, dtype))


def estimate_error(fit: ResidualFit, probes: Probes) -> Tensor:
    """Estimated mean relative row error: every probe compared with the fit without it, weighted by coverage.

    Stratified probes lie near the middle of their groups, so the estimate reads low for them.  # [B, H]
    """
    return weighted_error(fit.left_out, probes)

"""The paper's repair: an affine map of the sparse output, fitted on exact probe rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..probes import take_probes
from ..routing import pair_budget
from .base import Plan, Repair, Work, register, route
from .fit import apply, estimate_error, fit


@register
class ProbeFit(Repair):
    name = "probe"
    summary = "the paper's: an affine map of the sparse output, fitted on exact probe rows"
    probes = "stratified"

    def plan(self, work: Work) -> Plan:
        found = route(work, pair_budget(work.call, work.density, work.sizes.probes))
        if not work.sizes.probes:
            return Plan(found)
        policy = work.config.probe_policy or self.probes
        with work.clock.stage("probes"):
            return Plan(found, take_probes(work.call, work.grouping, work.sizes.probes, policy, work.backend))

    def working_dtype(self, work: Work) -> torch.dtype:
        return torch.float32 if work.sizes.probes else work.call.q.dtype

    def finish(self, work: Work, plan: Plan, out: Tensor) -> tuple[Tensor, Tensor | None]:
        if plan.probes is None:
            return out, None
        config, sizes, probes = work.config, work.sizes, plan.probes
        missed, x = probes.residual(out)
        found = fit(x, missed, probes.weights, sizes.repair_rank, config.ridge, config.subspace, work.backend)
        out = apply(out, found, probes, work.call.q.dtype, work.backend)
        # one probe alone is met exactly and says nothing about the others
        return out, estimate_error(found, probes) if sizes.probes > 1 else None

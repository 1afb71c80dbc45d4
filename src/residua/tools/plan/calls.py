"""The time of a sparse attention call; all of planning takes it from here.

For the default method on a known GPU it is the static estimate of `dev.gpu_model`, read from a stored
table. For other machines, and for the paper's method, it is computed from the machine's rates.
"""

import math
from dataclasses import dataclass

from ...config import Config
from . import cost
from .estimates import stored_estimate, stored_gpus
from .models import Architecture
from .speeds import Machine

TABLE = "python -m dev.gpu_model.table"
BY_ESTIMATE = (
    f"sparse calls: the static estimate of this GPU's kernels, from a stored table (`{TABLE}` writes it "
    "anew); nothing of it was measured on a GPU"
)
BY_RATES = "sparse calls: by the rates of the machine, not by an estimate of its kernels"
ESTIMATED_DIMS = (64, 128)  # head dims to which the table's figures may be scaled


@dataclass(frozen=True)
class SparseCall:
    """One warm call, in seconds; `cold` is the extra time of a layer's first call."""

    cells: float
    overhead: float
    cold: float
    peak_bytes: int  # in addition to q, k and v
    source: str


def time_call(
    model: Architecture, forward: cost.Forward, call: cost.CallCost, config: Config, machine: Machine
) -> SparseCall:
    """A sparse call of all heads of a layer on a machine."""
    lloyd = call.kmeans_flops / (1e12 * machine.grouping)
    cold = (config.kmeans_cold - config.kmeans_warm) * lloyd
    found = None
    if config.summarises and machine.name in stored_gpus() and model.head_dim in ESTIMATED_DIMS:
        tokens = round(math.sqrt(forward.pairs))
        found = stored_estimate(machine.name, tokens, model.heads, call.density, model.head_dim)
    if found is not None:
        cells = found.attention_ms / 1e3
        return SparseCall(cells, found.ms / 1e3 - cells, cold, round(found.peak_gib * 2**30), BY_ESTIMATE)
    pairs = 4 * model.head_dim * model.heads * forward.pairs
    routing = 0 if config.summarises else call.routing_flops  # an all-in density already includes it
    overhead = config.kmeans_warm * lloyd + routing / (1e12 * machine.sparse)
    overhead += call.moved_bytes / (1e12 * machine.bandwidth) + machine.call_seconds
    cells = call.density * pairs / (1e12 * machine.sparse)
    return SparseCall(cells, overhead, cold, call.peak_bytes, BY_RATES)

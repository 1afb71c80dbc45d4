"""The plan of one video: what it costs dense and sparse, and whether sparse is worth it."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ...config import Config
from . import cost
from .calls import SparseCall
from .memory import Memory
from .models import Architecture
from .speeds import Machine

MIN_GAIN = 1.05  # a smaller end-to-end gain is within the uncertainty of the estimate
PFLOP = 1e15


@dataclass(frozen=True)
class Plan:
    """What a generation costs. PFLOPs and seconds are those of the whole generation."""

    model: Architecture
    machine: Machine
    config: Config
    method: str  # the planned method, as text
    size: tuple[int, int]
    frames: int
    steps: int
    grid: tuple[int, int, int]
    forward: cost.Forward
    schedule: cost.Schedule
    call: cost.CallCost
    timed: SparseCall
    memory: Memory
    seconds: cost.Seconds
    seconds_fast: cost.Seconds | None  # both runs with the fastest dense kernel of the machine
    notes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def passes(self) -> int:
        return self.steps * self.model.passes

    @property
    def attention_pflops(self) -> float:
        return self.passes * self.forward.attention_flops / PFLOP

    @property
    def rest_pflops(self) -> float:
        return self.passes * self.forward.rest_flops / PFLOP

    @property
    def dense_pflops(self) -> float:
        return self.attention_pflops + self.rest_pflops

    @property
    def evaluated(self) -> float:
        """Share of all query-key pairs of the generation that is evaluated, dense calls included. With an
        all-in density it includes other work, in pair equivalents."""
        skipping = self.schedule.sparse_calls / self.schedule.calls
        return 1 - skipping * (1 - self.call.density)

    @property
    def sparse_pflops(self) -> float:
        """Attention at its density, and the rest of the model; `overhead_pflops` is what the density does not
        cover."""
        return self.evaluated * self.attention_pflops + self.rest_pflops

    @property
    def overhead_pflops(self) -> float:
        return cost.overhead_flops(self.call, self.schedule, self.config) / PFLOP

    @property
    def attention_speedup(self) -> float:
        return self.seconds.dense_attention / self.seconds.sparse_attention

    @property
    def speedup(self) -> float:
        return self.seconds.dense / self.seconds.sparse

    @property
    def speedup_fast(self) -> float | None:
        return None if self.seconds_fast is None else self.seconds_fast.dense / self.seconds_fast.sparse

    @property
    def worth_it(self) -> bool:
        return self.speedup >= MIN_GAIN

    @property
    def verdict(self) -> str:
        if not self.worth_it:
            return f"not worth it here: {self._why_not()}"
        if self.speedup_fast is not None and self.speedup_fast < MIN_GAIN:
            return (
                f"worth it only against the default dense kernel ({self.speedup:.2f} x); "
                f"with the best one it is {self.speedup_fast:.2f} x"
            )
        return f"worth it: {self.speedup:.2f} x end to end"

    def _why_not(self) -> str:
        if self.config.density == 1.0:
            return "density 1 skips nothing; ask for less"
        if self.tokens < cost.MIN_TOKENS:
            return (
                f"{self.tokens:,} tokens; calls of fewer than {cost.MIN_TOKENS:,} stay dense, because "
                "grouping costs more than it saves"
            )
        if not self.schedule.sparse_calls:
            return f"all {self.steps} step(s) are among the first steps, which stay dense; take more steps"
        share = self.seconds.dense_attention / self.seconds.dense
        if 1 / (1 - share) < MIN_GAIN:
            most = 1 / (1 - share)
            return f"attention is {share:.1%} of the time; even free attention would give {most:.2f} x"
        if self.seconds.overhead > self.seconds.saved:
            return f"grouping and routing take longer than the skipped pairs save ({self.speedup:.2f} x)"
        return f"{self.speedup:.3f} x end to end; below {MIN_GAIN} x the model cannot tell a gain from nothing"

    @property
    def assumptions(self) -> tuple[str, ...]:
        machine, model = self.machine, self.model
        dense = f"{machine.attention:g} TFLOP/s"
        if machine.fast_attention:
            dense += f" by default and {machine.fast_attention:g} at best"
        return (
            f"planned: {self.method}",
            "FLOPs: 2 per multiply-add of the blocks' matrix products, self- and cross-attention, patch "
            "embedding and output; not norms, softmax, modulation, text encoder, VAE",
            f"{self.steps} steps, {'two passes' if model.passes == 2 else 'one pass'} per step; "
            f"{self.schedule.first_dense or 'no step and no layer'} dense by rule",
            f"{machine.label}: dense attention {dense}, sparse cells {machine.sparse:g}, everything else "
            f"{machine.linear:g}, k-means {machine.grouping:g}; {machine.bandwidth:g} TB/s; "
            f"{1e3 * machine.call_seconds:g} ms per sparse call",
            f"basis: {machine.basis}",
            self.timed.source,
            f"k-means: {self.config.kmeans_warm} steps warm, {self.config.kmeans_cold} cold; parts run one "
            "after the other; text encoder and VAE are not in the times",
            "memory: weights and activations in the GPU's precision, at the worst moment of denoising; "
            "decoding by the VAE is not in it (tiling keeps that small)",
        )

    @property
    def paper(self) -> dict[str, Any] | None:
        """The paper's row, if the request is its setting."""
        row = self.model.paper
        if row is None or (row.size, row.frames, row.steps) != (self.size, self.frames, self.steps):
            return None
        return {
            "dense_pflops": row.dense_pflops,
            "dense_deviation": self.dense_pflops / row.dense_pflops - 1,
            "sparse_pflops": row.sparse_pflops,
            "sparse_deviation": self.sparse_pflops / row.sparse_pflops - 1,
            "density": row.density,
            "speedup": row.speedup,
            "seconds": None if row.seconds is None else list(row.seconds),
            "assumption": row.assumption,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model.name,
            "gpu": self.machine.name,
            "size": list(self.size),
            "frames": self.frames,
            "steps": self.steps,
            "passes": self.passes,
            "method": self.method,
            "density": self.config.density,
            "max_error": self.config.max_error,
            "tokens": self.tokens,
            "text_tokens": self.model.text_tokens,
            "grid": list(self.grid),
            "groups": {"query": self.call.query_groups, "kv": self.call.kv_groups},
            "calls": dataclasses.asdict(self.schedule),
            "call_density": self.call.density,
            "evaluated_share": self.evaluated,
            "attention_pflops": self.attention_pflops,
            "rest_pflops": self.rest_pflops,
            "dense_pflops": self.dense_pflops,
            "sparse_pflops": self.sparse_pflops,
            "overhead_pflops": self.overhead_pflops,
            "seconds": _times(self.seconds),
            "seconds_fast_dense": _times(self.seconds_fast),
            "attention_speedup": self.attention_speedup,
            "speedup": self.speedup,
            "speedup_fast_dense": self.speedup_fast,
            "memory_bytes": {
                "per_call": self.memory.call,
                "state": self.memory.state,
                "weights": self.memory.weights,
                "activations": self.memory.activations,
                "peak": self.memory.peak,
            },
            "offload": self.memory.offload,
            "fits": self.memory.fits,
            "worth_it": self.worth_it,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "assumptions": list(self.assumptions),
            "paper": self.paper,
        }


def _times(seconds: cost.Seconds | None) -> dict[str, float] | None:
    if seconds is None:
        return None
    totals = {name: getattr(seconds, name) for name in ("dense", "sparse", "sparse_attention")}
    return {**totals, **dataclasses.asdict(seconds)}

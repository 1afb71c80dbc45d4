"""Whether a generation fits into memory: weights (depending on offload), activations, and sparse calls."""

from dataclasses import dataclass

from ...errors import InputError
from ...util.spelling import did_you_mean
from . import cost
from .models import Architecture
from .speeds import Machine

OFFLOADS = ("none", "model", "sequential")
GIB = 2**30
RESERVED = 1.5 * GIB  # driver context, libraries, kernels
FRAGMENTS = 1.05  # overhead of the allocator


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU at the peak of denoising. Decoding by the VAE is not included."""

    offload: str
    weights: int
    activations: int
    call: int
    state: int
    limit: float | None  # GiB of the machine; None: unknown, so not judged
    others: dict[str, bool]  # offload -> whether that would fit

    @property
    def peak(self) -> int:
        return round(FRAGMENTS * (self.weights + self.activations + self.call + self.state) + RESERVED)

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.peak <= self.limit * GIB

    @property
    def verdict(self) -> str:
        peak = f"{self.peak / GIB:.1f} GiB"
        if self.limit is None:
            return f"{peak} in all"
        if self.fits:
            return f"fits: {peak} of {self.limit:g} GiB"
        way = next((name for name, fine in self.others.items() if fine), None)
        hint = "a smaller size, fewer frames, or a GPU with more memory" if way is None else f"--offload {way}"
        return f"does not fit: {peak} of {self.limit:g} GiB; {hint}"


def find_offload(offload: object) -> str:
    """One of the ways to offload."""
    if offload not in OFFLOADS:
        hint = did_you_mean(str(offload), OFFLOADS)
        raise InputError(f"offload={offload!r}: wanted one of {', '.join(OFFLOADS)}{hint}")
    return str(offload)


def count_memory(
    model: Architecture, forward: cost.Forward, machine: Machine, offload: str, call: int, state: int
) -> Memory:
    """What is on the GPU while the transformer runs.

    Args:
        model: The model.
        forward: One forward pass of it.
        machine: Where it runs.
        offload: One of `OFFLOADS`.
        call: Bytes of one sparse call in addition to q, k and v.
        state: Bytes that layers keep from step to step.
    """
    activations = count_activations(model, forward, machine.value_bytes)

    def at(how: str, others: dict[str, bool]) -> Memory:
        weights = resident_weights(model, machine.value_bytes, how)
        return Memory(how, weights, activations, call, state, machine.memory, others)

    return at(offload, {how: bool(at(how, {}).fits) for how in OFFLOADS[1:]})


def resident_weights(model: Architecture, value_bytes: int, offload: str) -> int:
    """Bytes of weights on the GPU at the same time: all; one component; or about one layer."""
    transformer = model.parameters or matrix_parameters(model)
    if offload == "none":
        billions = model.transformers * transformer + model.text_encoder + model.others
    elif offload == "model":
        billions = max(transformer, model.text_encoder)
    else:
        billions = transformer / model.layers
    return round(1e9 * billions * value_bytes)


def moved_weights(model: Architecture, passes: int, value_bytes: int, offload: str) -> int:
    """Bytes of weights that go to the GPU during one generation."""
    transformer = model.parameters or matrix_parameters(model)
    if offload == "none":
        return 0
    beside = model.text_encoder + model.others
    times = model.transformers if offload == "model" else passes
    return round(1e9 * (times * transformer + beside) * value_bytes)


def matrix_parameters(model: Architecture) -> float:
    """Billions of parameters in the blocks' matrices, estimated where they were not counted. If text runs
    through the blocks, it may have matrices of its own there, so they are counted twice."""
    inner, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = 2 * model.width * (inner + kv) + model.mlp_matrices * model.width * model.mlp
    if model.text == "cross":
        layer += 2 * model.width * inner + 2 * model.text_width * inner
    else:
        layer *= 2
    return model.layers * layer / 1e9


def count_activations(model: Architecture, forward: cost.Forward, value_bytes: int) -> int:
    """Activations of one layer: the residual stream and its norm in fp32, with q, k, v and output or with the
    hidden layer of the feed-forward, whichever is more."""
    inner, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = value_bytes * (2 * inner + 2 * kv)
    feed_forward = value_bytes * model.mlp * (model.mlp_matrices - 1)
    stream = (value_bytes + 4) * model.width
    return model.in_batch * forward.keys * (stream + max(attention, feed_forward))

"""The cost model: multiplications, bytes and seconds of one generation. A multiply-add counts as two FLOPs.

Counted: all matrix products of the blocks, self- and cross-attention, patch embedding and output projection.
Not counted: norms, activations, softmax, modulation, text encoder, VAE.
"""

import math
from dataclasses import dataclass

from ...config import Config
from ...hosts.settings import MIN_TOKENS, part_of
from ...method.rules import CPU, GPU
from ...method.sizes import default_groups, default_probes, left_by_text, share_of_text, summary_groups
from .models import Architecture

CELL_BYTES = 34  # per cell and head while the router sorts: score, value, pairs, order, cost and masks


@dataclass(frozen=True)
class Forward:
    """One forward pass."""

    queries: int
    keys: int
    attention_flops: int  # self-attention of all layers: scores and values
    rest_flops: int

    @property
    def pairs(self) -> int:
        return self.queries * self.keys


@dataclass(frozen=True)
class Schedule:
    """Which attention calls of a generation stay dense. A call is one layer in one pass."""

    dense_steps: int
    dense_layers: int
    dense_calls: int
    sparse_calls: int
    cold_calls: int  # sparse calls without centroids from the step before

    @property
    def calls(self) -> int:
        return self.dense_calls + self.sparse_calls

    @property
    def first_dense(self) -> str:
        """Which first steps and layers are dense, in words; empty if none are."""
        parts = ((self.dense_steps, "step"), (self.dense_layers, "layer"))
        return " and ".join(f"the first {n} {name}{'s' * (n > 1)}" for n, name in parts if n)


@dataclass(frozen=True)
class CallCost:
    """One sparse attention call."""

    density: float  # of all pairs, as close to the setting as possible
    text_density: float  # what text takes of it
    query_groups: int
    kv_groups: int
    probes: int
    kmeans_flops: int  # one Lloyd step on keys and queries
    routing_flops: int
    moved_bytes: int
    peak_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Seconds:
    """Time of one generation on one machine."""

    rest: float
    dense_attention: float  # if every call were dense
    dense_calls: float  # calls that stay dense in the sparse run
    sparse_cells: float
    overhead: float  # grouping, routing, permutation, reconstruction
    transfer: float = 0.0  # of weights to the GPU, where they are offloaded

    @property
    def sparse_attention(self) -> float:
        return self.dense_calls + self.sparse_cells + self.overhead

    @property
    def saved(self) -> float:
        """What the skipped pairs save, without the overhead."""
        return self.dense_attention - self.dense_calls - self.sparse_cells

    @property
    def dense(self) -> float:
        return self.rest + self.transfer + self.dense_attention

    @property
    def sparse(self) -> float:
        return self.rest + self.transfer + self.sparse_attention


def token_grid(model: Architecture, size: tuple[int, int], frames: int) -> tuple[int, int, int]:
    """Tokens along frames, height and width; 0 where the video is smaller than a patch."""
    width, height = size
    latents = (frames - 1) // model.frame_compression + 1
    edge = math.ceil if model.pads else math.floor
    rows, columns = (
        int(edge(pixels / (model.pixel_compression * patch)))
        for pixels, patch in zip((height, width), model.patch[1:], strict=True)
    )
    return latents // model.patch[0], rows, columns


def count_forward(model: Architecture, tokens: int) -> Forward:
    """FLOPs of one forward pass over that many video tokens."""
    text, inner = model.text_tokens, model.heads * model.head_dim
    in_stream = tokens + (0 if model.text == "cross" else text)
    queries = in_stream if model.text == "joint" else tokens
    projections = 4 * model.width * (inner + model.kv_heads * model.head_dim)
    feed_forward = 2 * model.mlp_matrices * model.width * model.mlp
    layer = in_stream * (projections + feed_forward)
    if model.text == "cross":
        layer += tokens * 4 * model.width * inner  # queries and output
        layer += text * 4 * model.text_width * inner  # keys and values
        layer += 4 * inner * tokens * text
    elif model.text == "keys":
        layer += 2 * inner * text * text  # causal attention within the text: half of its pairs
    ends = 2 * tokens * math.prod(model.patch) * (model.in_channels + model.out_channels) * model.width
    return Forward(
        queries=queries,
        keys=in_stream,
        attention_flops=model.layers * 4 * inner * queries * in_stream,
        rest_flops=model.layers * layer + ends,
    )


def schedule_calls(
    model: Architecture, steps: int, tokens: int, density: float, first_dense: tuple[float, float]
) -> Schedule:
    """The calls of a generation: the first steps and layers stay dense, or all if they are too short or skip
    nothing."""
    calls = steps * model.passes * model.layers
    dense_steps = min(steps, part_of(first_dense[0], steps))
    dense_layers = min(model.layers, part_of(first_dense[1], model.layers))
    sparse_sites = (model.layers - dense_layers) * model.passes
    sparse = (steps - dense_steps) * sparse_sites
    if tokens < MIN_TOKENS or density == 1.0:
        sparse = 0
    return Schedule(dense_steps, dense_layers, calls - sparse, sparse, min(sparse, sparse_sites * model.transformers))


def count_call(model: Architecture, forward: Forward, tokens: int, config: Config, value_bytes: int) -> CallCost:
    """What one sparse call evaluates, moves and holds, without the model's own tensors."""
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    exact_queries, pinned = forward.queries - tokens, forward.keys - tokens
    held = share_of_text(forward.queries, forward.keys, exact_queries, pinned)
    free = config.density  # of the pairs that may be skipped
    if config.summarises and not config.moves_budget:
        free = left_by_text(config.density, held)
    wanted = default_probes(config, forward.queries, free) if config.probes is None else config.probes
    probes = min(wanted, tokens, int(free * forward.queries / 2))
    cq, ck = default_groups(tokens, tokens)
    slots = rank = 0
    if config.summarises:
        rules = CPU if value_bytes == 4 else GPU
        cq, ck = summary_groups(tokens, tokens, free, rules)
        rule = rules.summary_rule(tokens, free)
        slots, rank = rule.slots, rule.rank
    # Text and probes are paid first, and every query group keeps at least a cell of average size.
    least = (probes + exact_queries) * forward.keys + tokens * pinned + tokens * tokens // ck
    if config.summarises:  # all in: a product of the router costs half a pair, a slot costs each row one pair
        least += cq * forward.keys // 2 + tokens * slots
    whole = held + (1 - held) * free if config.summarises else config.density
    coordinates = tokens * (heads * config.query_rank + kv_heads * config.key_rank)
    copies = value_bytes * dim * (heads * forward.queries + 2 * kv_heads * forward.keys)  # group-major q, k, v
    output = 4 * dim * heads * forward.queries  # fp32 until it is reconstructed
    indices = 16 * tokens * (heads + kv_heads)  # labels and order
    summary = 4 * dim * heads * cq * (2 * slots + 2 * rank)  # keys and values of the slots, drift
    return CallCost(
        density=min(1.0, max(whole, least / forward.pairs)),
        text_density=held,
        query_groups=cq,
        kv_groups=ck,
        probes=probes,
        kmeans_flops=2 * tokens * (kv_heads * ck * config.key_rank + heads * cq * config.query_rank),
        routing_flops=2 * dim * heads * cq * forward.keys,
        moved_bytes=2 * copies + 3 * output + 2 * 4 * coordinates,
        peak_bytes=copies + output + 4 * coordinates + indices + summary + CELL_BYTES * heads * cq * ck,
        state_bytes=value_bytes * dim * (heads * cq + kv_heads * ck),
    )


def overhead_flops(call: CallCost, schedule: Schedule, config: Config) -> int:
    """FLOPs of all k-means steps and of all routing, unless the density includes it."""
    warm = schedule.sparse_calls - schedule.cold_calls
    lloyd = warm * config.kmeans_warm + schedule.cold_calls * config.kmeans_cold
    routing = 0 if config.summarises else schedule.sparse_calls * call.routing_flops
    return lloyd * call.kmeans_flops + routing

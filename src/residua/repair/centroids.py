"""A tail without anchors: a skipped K/V group enters through its size, its key centroid and its value
centroid."""

from __future__ import annotations

from torch import Tensor

from ..execution.backend import Backend
from ..execution.torch_primitives import CHUNK_BYTES
from ..types import Call, ExtraKeys, Grouping
from .slots import Slots


def centroid_mass(call: Call, grouping: Grouping, backend: Backend) -> Tensor:
    """Log of the mass that a K/V group would have at an anchor if all its keys lay at its centroid; -inf
    for an empty one.  # [B, H, Cq, Ck] fp32"""
    centroids = grouping.kv_centroids.repeat_interleave(call.shares, dim=1)
    sizes = grouping.kv.sizes.repeat_interleave(call.shares, dim=1)
    return call.scale * backend.matmul(grouping.anchors, centroids.mT) + sizes.log()[..., None, :]


def merge(call: Call, grouping: Grouping, slots: Slots, log_mass: Tensor, backend: Backend) -> ExtraKeys:
    """Extra keys from centroids, weighted by their mass where several share a slot."""
    batch, heads, cq, groups = slots.index.shape
    count = slots.log_mass.shape[-1]
    means = backend.group_means(call.v, grouping.kv)
    keys = log_mass.new_zeros(batch, heads, cq, count + 1, call.k.shape[-1])
    values = log_mass.new_zeros(batch, heads, cq, count + 1, call.v.shape[-1])
    index = slots.index.long() % (count + 1)  # -1 becomes the spare last slot
    padded = slots.log_mass.new_full((batch, heads, cq, count + 1), float("inf"))
    padded[..., :count] = slots.log_mass
    weight = (log_mass - padded.gather(-1, index)).exp()  # 0 in the spare slot
    step = max(1, CHUNK_BYTES // (4 * batch * heads * groups * max(keys.shape[-1], values.shape[-1])))
    for source, sums in ((grouping.kv_centroids, keys), (means, values)):
        source = source.repeat_interleave(call.shares, dim=1)[..., None, :, :]  # [B, H, 1, Ck, D]
        for first in range(0, cq, step):
            part = slice(first, first + step)
            terms = weight[:, :, part, :, None] * source
            at = index[:, :, part, :, None].expand_as(terms)
            sums[:, :, part].scatter_add_(-2, at, terms)
    keys, values = keys[..., :count, :], values[..., :count, :]
    log_weight = (
        slots.log_mass - call.scale * backend.matmul(grouping.anchors[..., None, :], keys.mT)[..., 0, :]
    )
    return ExtraKeys(keys, values, log_weight)

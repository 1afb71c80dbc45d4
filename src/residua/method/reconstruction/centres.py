"""What the keys of a K/V group amount to where nothing is computed for its query groups: one key and value in
the middle of the group, and how many keys it counts for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...types import Call, Grouping, HeadCost
from ..route import mass_at_anchors
from ..stages import GroupedCall, SizedCall


@dataclass(frozen=True)
class Centres:
    """One key for each K/V group, which has the group's mass for a query q: log_size + scale * q . key."""

    keys: Tensor  # [B, Hkv, Ck, D] fp32
    values: Tensor  # [B, Hkv, Ck, Dv] fp32
    log_size: Tensor  # [B, Hkv, Ck] fp32, -inf for an empty group

    @staticmethod
    def of(grouped: GroupedCall) -> Centres:
        """The centres of all K/V groups, for which their keys count by their softmax weights for the mean query,
        or all alike (`Rules.weighs_centres`)."""
        call, grouping, backend = grouped.call, grouped.grouping, grouped.backend
        if not grouped.rules.weighs_centres:
            values = backend.group_means(call.v, grouping.kv)
            return Centres(grouping.kv_centroids, values, grouping.kv.sizes.float().log())
        middle = _mean_query(call, grouping)
        log_mass = backend.cell_mass(middle, call.k, grouping.kv, call.scale)[:, :, 0]  # [B, Hkv, Ck]
        label = grouping.kv.labels.clamp(min=0)  # padding: computed and dropped
        k, v = call.k.float(), call.v.float()
        weight = call.scale * backend.matmul(middle, k.mT)[:, :, 0] - log_mass.gather(-1, label)
        # the weights of a group sum to 1, and a mean over it divides by its size
        weight = (weight.exp() * grouping.kv.sizes.gather(-1, label))[..., None]
        keys, values = (backend.group_means(x * weight, grouping.kv) for x in (k, v))
        return Centres(keys, values, log_mass - call.scale * (middle * keys).sum(-1))

    def log_mass(self, grouped: GroupedCall) -> Tensor:
        """Of every K/V group at every anchor.  # [B, H, Cq, Ck] fp32"""
        return mass_at_anchors(grouped.call, grouped.grouping, self.keys, self.log_size, grouped.backend)


def centres_cost(sized: SizedCall) -> HeadCost:
    """What finding the centres and their masses costs a head."""
    call, groups = sized.call, sized.groups
    product = call.q.shape[3] / (call.q.shape[3] + call.v.shape[3])  # as a share of a pair
    found = (1 + 2 * product) / call.shares if sized.rules.weighs_centres else 0.0
    return HeadCost(fixed=groups[0] * groups[1] * product, per_key=found)


def _mean_query(call: Call, grouping: Grouping) -> Tensor:
    """The mean over all rows of the heads that share keys.  # [B, Hkv, 1, D] fp32"""
    size = grouping.query.sizes.float()[..., None]  # [B, H, Cq, 1]
    total = (grouping.anchors * size).sum(2).unflatten(1, (call.k.shape[1], call.shares)).sum(2)
    rows = size.sum(2).unflatten(1, (call.k.shape[1], call.shares)).sum(2).clamp(min=1)
    return (total / rows)[:, :, None]

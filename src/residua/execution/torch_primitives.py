"""Every primitive of a call in plain torch: any device, bounded memory. The base of all backends.

Work is cut into chunks so that a temporary never exceeds about `CHUNK_BYTES`, whatever N is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..subspace import leading_basis
from ..types import Partition

CHUNK_BYTES = 64 << 20
RMS_FLOOR = 1e-6
FILL_PASSES = 4  # of the budget over the cells
FEATURE_EPS = 1e-6  # inside the root of the repair's feature scale
LEVERAGE_MOST = (
    0.9  # above it a probe decides its own fit and says little (docs/decisions/0003-error-estimate.md)
)
VARIANCE_FLOOR = 1e-4  # of the mean variance of the keys, so that their covariance can be inverted
ENERGY_LEAST = 1e-12  # of the largest: below it a direction of the residuals carries nothing


def _chunk(row_bytes: int, total: int) -> int:
    return max(1, min(total, CHUNK_BYTES // max(1, row_bytes)))


def project(x: Tensor, factor: Tensor, normalise: bool) -> Tensor:
    out = torch.matmul(x.float(), factor)  # [B, H, N, R]
    if normalise:
        rms = out.square().mean(-1, keepdim=True).sqrt_().clamp_(min=RMS_FLOOR)
        out /= rms
    return out


def assign(x: Tensor, centres: Tensor) -> Tensor:
    """Index of the nearest centre of every row; ties and NaN never leave the range.  # [G, N]"""
    groups, rows, _ = x.shape
    half_norm = centres.square().sum(-1)[:, None].mul(0.5)  # [G, 1, C]
    labels = torch.empty(groups, rows, dtype=torch.long, device=x.device)
    step = _chunk(4 * groups * centres.shape[1], rows)
    for start in range(0, rows, step):
        part = x[:, start : start + step]
        # |x|^2 is the same for every centre, so the nearest centre has the least |c|^2 / 2 - x.c
        torch.argmin(
            torch.baddbmm(half_norm, part, centres.mT, alpha=-1), -1, out=labels[:, start : start + step]
        )
    return labels


def kmeans_step(x: Tensor, centres: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    labels = assign(x, centres)
    if valid is not None:
        labels = torch.where(valid, labels, -1)
    groups = centres.shape[1]
    sizes = count_labels(labels, groups)
    means = group_sums(x[None], labels[None], sizes[None])[0] / sizes.clamp(min=1)[..., None]
    return labels, torch.where(sizes[..., None] > 0, means, centres), sizes


def count_labels(labels: Tensor, groups: int) -> Tensor:
    """How many tokens carry each label; negative labels are not counted.  # [..., N] -> [..., groups]"""
    counts = torch.zeros(*labels.shape[:-1], groups, dtype=torch.long, device=labels.device)
    return counts.scatter_add_(-1, labels.clamp(min=0), (labels >= 0).long())


def gather_rows(x: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(x, order[..., None], dim=-2)


def group_means(x: Tensor, partition: Partition) -> Tensor:
    sizes = partition.sizes  # [B, H, C]
    return group_sums(x, partition.labels, sizes) / sizes.clamp(min=1)[..., None]


def group_sums(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
    """Sums of the rows of each group, always added in the same order.

    x [B, H, N, D], labels [B, H, N], sizes [B, H, C] -> [B, H, C, D] fp32
    """
    batch, heads, _, dim = x.shape
    groups = sizes.shape[-1]
    if x.device.type == "cpu":
        sums = torch.zeros(batch, heads, groups + 1, dim)
        index = labels.remainder(groups + 1)  # -1 becomes the spare last row
        for b in range(batch):
            for h in range(heads):
                sums[b, h].index_add_(0, index[b, h], x[b, h].float())
        return sums[..., :groups, :]
    # on a GPU index_add_ adds in any order; sorted segments do not
    order = torch.where(labels < 0, groups, labels).argsort(dim=-1, stable=True)
    rest = labels.shape[-1] - sizes.sum(-1, keepdim=True)
    lengths = torch.cat([sizes, rest], -1).flatten()
    sums = torch.segment_reduce(
        gather_rows(x, order).float().flatten(0, 2), "sum", lengths=lengths, unsafe=True
    )
    return sums.view(batch, heads, groups + 1, dim)[..., :groups, :]


def cell_mass(anchors: Tensor, k: Tensor, kv: Partition, scale: float) -> Tensor:
    batch, heads, cq, _ = anchors.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    shares = heads // kv_heads
    index = kv.labels.remainder(kv.groups + 1)  # padding goes to a spare last group
    mass = torch.empty(batch, kv_heads, shares * cq, kv.groups + 1, device=k.device)
    rows = anchors.unflatten(1, (kv_heads, shares)).flatten(2, 3) * scale  # [B, Hkv, shares * Cq, D]
    step = _chunk(12 * tokens, shares * cq)
    for b in range(batch):
        for g in range(kv_heads):
            keys = k[b, g].float()
            for start in range(0, shares * cq, step):
                logits = rows[b, g, start : start + step] @ keys.mT  # [step, Nk]
                mass[b, g, start : start + step] = _grouped_logsumexp(logits, index[b, g], kv.groups + 1)
    return mass[..., : kv.groups].reshape(batch, heads, cq, kv.groups)


def _grouped_logsumexp(logits: Tensor, index: Tensor, groups: int) -> Tensor:
    """logsumexp over the columns with the same index.  # [rows, Nk] -> [rows, groups]"""
    index = index.expand_as(logits)
    top = logits.new_full((logits.shape[0], groups), -torch.inf)
    top.scatter_reduce_(1, index, logits, "amax")
    safe = torch.where(top.isinf(), 0.0, top)
    sums = torch.zeros_like(top).scatter_add_(1, index, (logits - safe.gather(1, index)).exp_())
    return sums.log_().add_(safe)


def slot_means(
    anchors: Tensor, k: Tensor, v: Tensor, kv: Partition, slots: Tensor, log_mass: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, cq, dim = anchors.shape
    shares, count = heads // k.shape[1], log_mass.shape[-1]
    sums = torch.zeros(batch, heads, cq * (count + 1), dim + v.shape[-1], device=k.device)
    index = torch.where(slots < 0, count, slots).long()  # cells of no slot share a spare last one
    index = index + torch.arange(cq, device=k.device)[:, None] * (count + 1)  # [B, H, Cq, Ck]
    mass = torch.nn.functional.pad(log_mass, (0, 1), value=torch.inf).flatten(2)
    ends = kv.offsets.tolist()
    for b in range(batch):
        for h in range(heads):
            g = h // shares
            rows = torch.cat([k[b, g].float(), v[b, g].float()], -1)[kv.order[b, g]]  # group-major
            for c in range(kv.groups):
                part = rows[ends[b][g][c] : ends[b][g][c + 1]]
                at = index[b, h, :, c]
                logits = anchors[b, h].float() @ part[:, :dim].mT * scale - mass[b, h, at][:, None]
                sums[b, h].index_add_(0, at, logits.exp_() @ part)
    sums = sums.unflatten(2, (cq, count + 1))[..., :count, :]
    return sums[..., :dim].contiguous(), sums[..., dim:].contiguous()


def group_covariance(x: Tensor, v: Tensor, kv: Partition) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, rank = x.shape
    dim, sizes = v.shape[-1], kv.sizes.clamp(min=1)[..., None]
    means, value_means = group_means(x, kv), group_means(v, kv)
    covariance = torch.zeros(batch, heads, kv.groups + 1, rank * dim, device=x.device)
    variance = torch.zeros(batch, heads, kv.groups + 1, rank, device=x.device)
    index = kv.labels.remainder(kv.groups + 1)  # -1 becomes the spare last row
    step = _chunk(8 * rank * dim, tokens)
    for b in range(batch):
        for h in range(heads):
            for start in range(0, tokens, step):
                at = index[b, h, start : start + step]
                here = at.clamp(max=kv.groups - 1)
                off = x[b, h, start : start + step].float() - means[b, h, here]
                value_off = v[b, h, start : start + step].float() - value_means[b, h, here]
                covariance[b, h].index_add_(0, at, (off[:, :, None] * value_off[:, None]).flatten(1))
                variance[b, h].index_add_(0, at, off.square())
    covariance = (covariance[..., : kv.groups, :] / sizes).unflatten(-1, (rank, dim))
    return covariance, variance[..., : kv.groups, :] / sizes


def attend_rows(rows: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, count, _ = rows.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    working = torch.float64 if rows.dtype == torch.float64 else torch.float32
    shared = rows.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)  # [B, Hkv, shares * M, D]
    out = rows.new_zeros(*shared.shape[:3], v.shape[-1], dtype=working)
    step = _chunk(8 * tokens, shared.shape[2])
    for b in range(batch):
        hidden = None if key_mask is None else ~key_mask[b]
        for g in range(kv_heads):
            keys, values = k[b, g].to(working), v[b, g].to(working)
            if hidden is not None:
                values = torch.where(hidden[:, None], 0.0, values)  # 0 * NaN must not reach the output
            for start in range(0, shared.shape[2], step):
                logits = shared[b, g, start : start + step].to(working) @ keys.mT * scale  # [step, Nk]
                if hidden is not None:
                    logits.masked_fill_(hidden, -torch.inf)
                out[b, g, start : start + step] = _softmax(logits) @ values
    return out.reshape(batch, heads, count, v.shape[-1])


def split_rows(
    rows: Tensor, k: Tensor, v: Tensor, kv: Partition, kept: Tensor, key_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, count, _ = rows.shape
    shares, tokens = heads // k.shape[1], k.shape[2]
    exact = attend_rows(rows, k, v, key_mask, scale)
    part = torch.zeros_like(exact)
    lse = exact.new_empty(batch, heads, count)
    groups = torch.nn.functional.pad(kept, (0, 1))  # label -1, padding, is the last: never kept
    step = _chunk(8 * tokens, count)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // shares].to(exact.dtype), v[b, h // shares].to(exact.dtype)
            for start in range(0, count, step):
                at = slice(start, start + step)
                seen = groups[b, h, at][:, kv.labels[b, h // shares]]  # [step, Nk]
                logits = rows[b, h, at].to(exact.dtype) @ keys.mT * scale
                logits.masked_fill_(~seen, -torch.inf)
                # what no row keeps must not reach it as 0 * NaN
                part[b, h, at] = _softmax(logits) @ torch.where(seen.any(0)[:, None], values, 0.0)
                lse[b, h, at] = logits.logsumexp(-1)
    return exact, part, lse


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; a row without any key gives zeros instead of NaN."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, logits.softmax(-1))


def add_affine(out: Tensor, left: Tensor, right: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    result = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
    step = _chunk(12 * out.shape[-1] * out.shape[0] * out.shape[1], out.shape[2])
    for start in range(0, out.shape[2], step):
        part = out[:, :, start : start + step]
        result[:, :, start : start + step] = part + (part @ left @ right + bias[..., None, :])
    return result


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    # the largest entry is scaled to 1: no overflow in the solver
    size = matrix.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    values, vectors = torch.linalg.eigh(matrix / size)
    return values * size[..., 0], vectors


def shared_directions(spread: Tensor, covariance: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    floor = (VARIANCE_FLOOR * mean).clamp(min=torch.finfo(torch.float32).tiny)
    root = torch.linalg.cholesky_ex(covariance + floor * eye).L
    leading = leading_basis(root.mT @ spread @ root, rank)
    to_key = torch.linalg.solve_triangular(root.mT, leading, upper=True)
    return (scale * (root @ leading)).float(), to_key.float()


def second_moment(x: Tensor, counted: Tensor | None, centred: bool) -> Tensor:
    x = x.double()
    taken = torch.isfinite(x).all(-1, keepdim=True)  # [..., M, 1]
    if counted is not None:
        taken &= counted[..., None]
    count = taken.sum(-2, keepdim=True).clamp(min=1)
    x = torch.where(taken, x, 0.0)
    if centred:
        x = torch.where(taken, x - x.sum(-2, keepdim=True) / count, 0.0)
    return x.mT @ x / count


def central_rows(x: Tensor, labels: Tensor, groups: int, count: int) -> Tensor:
    counts = count_labels(labels, groups)
    means = group_sums(x, labels, counts) / counts.clamp(min=1)[..., None]
    distance = (x - gather_rows(means, labels.clamp(min=0))).norm(dim=-1)  # [B, H, N]

    bins = torch.where(labels < 0, groups, labels)
    by_distance = distance.argsort(dim=-1, stable=True)
    by_group = bins.gather(-1, by_distance).argsort(dim=-1, stable=True)
    order = by_distance.gather(-1, by_group)  # group by group, nearest first
    first = torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
    place = torch.arange(labels.shape[-1], device=labels.device).expand_as(labels)
    rank = torch.empty_like(labels).scatter_(-1, order, place) - first.gather(-1, bins)
    turn = torch.where(labels >= 0, rank * groups + labels, torch.iinfo(torch.long).max)
    return turn.topk(count, dim=-1, largest=False, sorted=True).indices


def spend(log_share: Tensor, query_sizes: Tensor, kv_sizes: Tensor, budget: Tensor) -> Tensor:
    pairs = query_sizes[..., :, None] * kv_sizes[..., None, :]  # [B, H, Cq, Ck] int64
    value = log_share - kv_sizes.clamp(min=1).log()[..., None, :]
    value = torch.where(value.isnan(), torch.inf, value)
    value = torch.where(pairs > 0, value, -torch.inf)

    best = value.argmax(-1, keepdim=True)
    kept = torch.zeros_like(pairs, dtype=torch.bool).scatter_(-1, best, pairs.gather(-1, best) > 0)

    order = value.flatten(-2).argsort(dim=-1, descending=True, stable=True)  # [B, H, Cq * Ck]
    cost = pairs.flatten(-2).gather(-1, order)
    taken = kept.flatten(-2).gather(-1, order)
    left = budget - (cost * taken).sum(-1)
    for _ in range(FILL_PASSES):
        # a cell that does not fit is passed over, so that one huge cell does not end the spending
        fits = ~taken & (cost > 0) & (cost <= left[..., None])
        fits &= torch.where(fits, cost, 0).cumsum(-1) <= left[..., None]
        taken |= fits
        left = left - (cost * fits).sum(-1)
    return torch.zeros_like(taken).scatter_(-1, order, taken).view_as(kept)


def fit_repair(
    x: Tensor, residual: Tensor, weights: Tensor, rank: int, ridge: float, subspace: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    finite = torch.isfinite(x).all(-1)  # [..., M]
    weights = torch.where(finite, weights.double(), 0.0)
    x, residual = (torch.where(finite[..., None], t.double(), 0.0) for t in (x, residual))
    poison = torch.where(torch.isfinite(residual), 0.0, torch.nan).sum(-2)  # [..., Dv]
    residual = torch.nan_to_num(residual, nan=0.0, posinf=0.0, neginf=0.0)

    total = weights.sum(-1, keepdim=True)
    alpha = (weights / total.clamp(min=torch.finfo(torch.float64).tiny))[..., None]  # [..., M, 1]
    mean_x, mean_r = ((alpha * t).sum(-2, keepdim=True) for t in (x, residual))
    scale = ((alpha * (x - mean_x).square()).sum(-2, keepdim=True) + FEATURE_EPS).sqrt()
    root = (alpha * x.shape[-2]).sqrt()  # W^(1/2), weights of unit mean
    features = root * (x - mean_x) / scale  # [..., M, Dv]
    targets = root * (residual - mean_r)

    right = _leading_directions(targets, rank).mT if subspace else torch.eye(x.shape[-1]).to(targets)
    left, leverage = _ridge(features, targets @ right.mT, ridge)  # [..., Dv, R], [..., M]

    error = residual - mean_r - (x - mean_x) / scale @ left @ right
    kept = (1 - leverage - alpha[..., 0]).clamp(min=1 - LEVERAGE_MOST)
    left = left / scale.mT
    bias = (mean_r - mean_x @ left @ right)[..., 0, :] + poison
    right = right.expand(*left.shape[:-2], -1, -1)
    return left.float(), right.float(), bias.float(), (error / kept[..., None]).float()


def _ridge(features: Tensor, targets: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """argmin |targets - features B|^2 + ridge |B|^2 in the smaller of its two forms, and each row's leverage.

    features [..., M, Dv], targets [..., M, R] -> B [..., Dv, R], leverage [..., M]
    """
    rows, dim = features.shape[-2:]
    gram = features.mT @ features if dim <= rows else features @ features.mT  # [..., n, n]
    # without a ridge the equations may be singular; a speck of one leaves the solution as it is
    speck = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None].clamp(min=1e-30)
    gram.diagonal(dim1=-2, dim2=-1).add_(speck.clamp(min=ridge))
    root, _ = torch.linalg.cholesky_ex(gram)
    if dim <= rows:
        solved = torch.cholesky_solve(features.mT, root)  # [..., Dv, M]
        return solved @ targets, (features * solved.mT).sum(-1)
    both = torch.cholesky_solve(torch.cat([targets, features @ features.mT], -1), root)  # [..., M, R + M]
    return features.mT @ both[..., : targets.shape[-1]], both[..., targets.shape[-1] :].diagonal(
        dim1=-2, dim2=-1
    )


def _leading_directions(residual: Tensor, rank: int) -> Tensor:
    """Leading right singular vectors of residual [..., M, Dv], from its smaller Gram matrix; directions
    that carry nothing are zero.  # [..., Dv, min(rank, M)]"""
    rows, dim = residual.shape[-2:]
    rank = min(rank, rows, dim)
    if residual.device.type != "cpu":
        # an eigensolver would make the GPU wait; any basis of the space will do
        return leading_basis(residual.mT @ residual, rank)
    gram = residual.mT @ residual if dim <= rows else residual @ residual.mT
    energy, vectors = eigh(gram)  # ascending
    energy, vectors = energy.flip(-1)[..., None, :rank], vectors.flip(-1)[..., :rank]
    tiny = torch.finfo(gram.dtype).tiny
    largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None].clamp(min=tiny)
    if dim > rows:
        vectors = residual.mT @ vectors / energy.clamp(min=tiny).sqrt()
    return torch.where(energy > ENERGY_LEAST * largest, vectors, 0.0)

"""Lloyd's k-means, batched over heads, deterministic, with warm starts. It always ends: the number of steps
is fixed, and coordinates that are not finite count as zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.backend import Backend
from ...util.golden import ONE, golden_indices, golden_places


@dataclass(frozen=True)
class Clusters:
    """Labels, centres and sizes that are consistent: a centre is the mean of the rows with its label."""

    labels: Tensor  # [G, N] int64, -1 where a row is not valid
    centres: Tensor  # [G, C, R] fp32; an empty group keeps its old centre
    sizes: Tensor  # [G, C] int64


def kmeans(
    x: Tensor, groups: int, steps: int, *, start: Tensor | None = None, valid: Tensor | None = None, backend: Backend
) -> Clusters:
    """Clusters the rows of x [G, N, R] into `groups` groups per head with `steps` Lloyd steps.

    `start` [G, C, R] gives the first centres; without it they are rows spread over the sequence. `valid` [G,
    N] leaves rows out."""
    centres = first_centres(x, groups, valid) if start is None else start
    return Clusters(*backend.lloyd(x, centres, max(1, steps), valid))


def kmeans_labels(
    x: Tensor, groups: int, steps: int, *, start: Tensor | None = None, valid: Tensor | None = None, backend: Backend
) -> Tensor:
    """Only the labels of `kmeans`.  # [G, N] int64"""
    centres = first_centres(x, groups, valid) if start is None else start
    return backend.lloyd(x, centres, max(1, steps), valid, means=False)[0]


def first_rows(shape: tuple[int, int], groups: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """One row from each of `groups` equal parts of the sequence, counting valid rows only.  # [G, C]

    The position within a part follows the golden ratio."""
    heads, rows = shape
    if valid is None:
        return golden_indices(groups, rows, device).expand(heads, groups)
    ranked = torch.argsort(valid.logical_not().to(torch.uint8), dim=-1, stable=True)  # valid rows first
    return ranked.gather(-1, golden_places(groups, device) * valid.sum(-1, keepdim=True) // (groups * ONE))


def first_centres(x: Tensor, groups: int, valid: Tensor | None) -> Tensor:
    index = first_rows((x.shape[0], x.shape[1]), groups, valid, x.device)
    return torch.take_along_dim(x, index[..., None], dim=1)  # [G, C, R]

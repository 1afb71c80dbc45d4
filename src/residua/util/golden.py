"""Indices spread by the golden ratio. Evenly spaced ones alias: whenever the spacing is a multiple of the
picture's width, they all lie in one column of the picture."""

import torch
from torch import Tensor

ONE, RATIO = 1 << 16, 40503  # RATIO / ONE is the golden ratio, 0.618


def golden_places(count: int, device: torch.device) -> Tensor:
    """One place in each of `count` equal parts of a sequence; where in its part follows the golden ratio.

    Multiply by the length of the sequence and divide by `count * ONE` for an index.  # [count] int64
    """
    part = torch.arange(count, device=device)
    return part * ONE + part * RATIO % ONE


def golden_indices(count: int, total: int, device: torch.device) -> Tensor:
    """`count` ascending indices of range(total), spread by the golden ratio; neighbours may coincide where
    `count` is more than half of `total`.  # [count]"""
    return golden_places(count, device) * total // max(1, count * ONE)


def golden_order(count: int, device: torch.device) -> Tensor:
    """A permutation of range(count) in which any first few entries are spread over all of it.  # [count]"""
    return (torch.arange(count, device=device) * RATIO % ONE).argsort(stable=True)

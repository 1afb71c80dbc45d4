"""Tensors as the kernels take them, and the parts of argument structs that many kernels share.

A struct holds addresses, not tensors: whatever is converted here must live in a variable for as long as the
library reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import RouteError
from ...types import Partition
from . import abi


def row_major(x: Tensor) -> Tensor:
    """`x` with the elements of a row side by side; the kernels read any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def new_floats(*shape: int) -> Tensor:
    """Room for fp32 results, whatever torch's default dtype is: the library writes four bytes per number."""
    return torch.empty(shape, dtype=torch.float32)


def floats(x: Tensor) -> Tensor:
    """`x` in fp32 and contiguous."""
    return x.float().contiguous()


def bytes_of(mask: Tensor | None) -> Tensor | None:
    """A bool mask as one byte per element."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def pointer(x: Tensor | None) -> int | None:
    """The address of a tensor that may be left out."""
    return None if x is None else x.data_ptr()


def contiguous(partition: Partition) -> Partition:
    """The partition with contiguous order and offsets; RouteError if they are not int64."""
    order, offsets = partition.order.contiguous(), partition.offsets.contiguous()
    if order.dtype != torch.long or offsets.dtype != torch.long:
        raise RouteError(f"partition in {order.dtype} / {offsets.dtype}: wanted int64")
    return Partition(partition.labels, order, offsets)


def groups_of(partition: Partition) -> abi.Groups:
    """The struct of a contiguous partition."""
    order, offsets = partition.order, partition.offsets
    return abi.Groups(
        order=order.data_ptr(), offsets=offsets.data_ptr(), tokens=order.shape[-1], groups=partition.groups
    )


def shape_of(q: Tensor, k: Tensor, v: Tensor) -> abi.Shape:
    """The sizes of a call with these tensors."""
    batch, heads, queries, dim = q.shape
    return abi.Shape(
        batch=batch, heads=heads, kv_heads=k.shape[1], queries=queries, keys=k.shape[2], dim=dim, value_dim=v.shape[3]
    )

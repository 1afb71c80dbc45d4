"""CUDA tensors without memory, in any build of torch: they have shapes, dtypes and a device, and no values.

A build without CUDA has no device guard, and a few bindings of torch's Python side ask for one. Those are
sent to the operators behind them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class _Rerouted(TorchFunctionMode):
    """Indexing, `contiguous` and `~` without a device guard."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.contiguous:
            x = args[0]
            return x if x.is_contiguous() else aten.clone(x, memory_format=torch.contiguous_format)
        if function is Tensor.__invert__:
            return aten.bitwise_not(args[0])
        if function is Tensor.__getitem__:
            return _take(*args)
        if function is Tensor.__setitem__:
            target, value = _take(args[0], args[1]), args[2]
            return aten.copy_(target, value) if isinstance(value, Tensor) else aten.fill_(target, value)
        return function(*args, **(kwargs or {}))


def _take(x: Tensor, index: Any) -> Tensor:
    """`x[index]` for what a call uses: slices, numbers, None, an ellipsis, tensors of indices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        taken = sum(part is not None and part is not Ellipsis for part in parts)
        parts[place : place + 1] = [slice(None)] * (x.ndim - taken)
    dim, gathered = 0, {}
    for part in parts:
        if part is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(part, slice):
            if part != slice(None):
                x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, int):
            x = aten.select(x, dim, part)
            dim -= 1
        else:
            gathered[dim] = part
        dim += 1
    if gathered:
        x = aten.index(x, [gathered.get(place) for place in range(max(gathered) + 1)])
    return x


@contextmanager
def fake_cuda(processors: int = 132) -> Iterator[None]:
    """Inside, `torch.empty(..., device="cuda")` works without a GPU, and reading a value fails."""
    device = SimpleNamespace(multi_processor_count=processors)
    properties = mock.patch.object(torch.cuda, "get_device_properties", lambda *_: device)
    with FakeTensorMode(), properties, torch.no_grad(), _Rerouted():
        yield

"""Memory that was never written holds what no result should depend on: whatever reads it shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from residua.ops.native import library

MADE = ("empty", "empty_like", "empty_strided")
METHODS = ("new_empty", "new_empty_strided")


NAN, NUMBERS = 0xFF, 0x41  # the byte that fills scratch memory: as floats, NaN and about 12


def _spoiled(x: Tensor, byte: int) -> Tensor:
    if x.device.type == "meta":
        return x
    if x.is_floating_point() or x.is_complex():
        return x.fill_(torch.nan if byte == NAN else 12.0)
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max if byte == NAN else 3)


def _poisoned(make: Callable[..., Tensor], byte: int) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        return _spoiled(make(*args, **kwargs), byte)

    return made


@contextmanager
def poisoned_memory(byte: int = NAN) -> Iterator[None]:
    """Fills every new `torch.empty` tensor, and the native library's scratch memory before each of its tasks.
    NaN may vanish in a comparison where a number would not, so there are two kinds."""
    functions = {name: getattr(torch, name) for name in MADE}
    methods = {name: getattr(Tensor, name) for name in METHODS}
    handle = library.load().cdll
    for name, make in functions.items():
        setattr(torch, name, _poisoned(make, byte))
    for name, make in methods.items():
        setattr(Tensor, name, _poisoned(make, byte))
    if handle is not None:
        handle.residua_poison(byte)
    try:
        yield
    finally:
        if handle is not None:
            handle.residua_poison(-1)
        for name, make in methods.items():
            setattr(Tensor, name, make)
        for name, make in functions.items():
            setattr(torch, name, make)
